"""What makes a ring write itself."""

import pytest

from kvcommon import messages as msg
from kvcommon import reasons
from kvworker.alarm import alarm
from kvworker.core.commands import SendToModel, SendToScheduler
from kvworker.core.events import PeerLost, Ticked

NOW = Ticked(now_ns=1)


def ended(outcome: msg.JobOutcome) -> msg.JobsEnded:
    return msg.JobsEnded(ends=(msg.JobEnd(job_id=4, outcome=outcome, reason="why"),))


def test_a_lost_peer() -> None:
    event = PeerLost(now_ns=1, engine="e#0", role="model", epoch=1, reason="it died")
    assert alarm(event, []) == "the model side of e#0 is lost: it died"


def test_a_failed_job_and_a_store_that_went_down() -> None:
    failed = SendToScheduler(engine="e#0", body=ended(msg.JobOutcome.FAILED))
    assert alarm(NOW, [failed]) == "job 4 of e#0 failed: why"
    down = msg.StoreHealth(state=msg.StoreState.DOWN, reason=reasons.STORE_DOWN)
    assert alarm(NOW, [SendToScheduler(engine="e#0", body=down)]) == "store down: store-down"


@pytest.mark.parametrize(
    "command",
    [
        SendToScheduler(engine="e#0", body=ended(msg.JobOutcome.DONE)),
        SendToScheduler(engine="e#0", body=ended(msg.JobOutcome.CANCELLED)),
        SendToScheduler(engine="e#0", body=msg.StoreHealth(state=msg.StoreState.UP)),
        # It is said to the scheduler side too.
        SendToModel(engine="e#0", body=ended(msg.JobOutcome.FAILED)),
    ],
)
def test_what_is_no_reason(command: SendToModel | SendToScheduler) -> None:
    assert alarm(NOW, [command]) == ""
