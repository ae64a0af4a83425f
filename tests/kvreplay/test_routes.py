"""Records reach the requests that they touch, and work does not grow with those that live."""

from pathlib import Path

import pytest

from kvcommon import messages as msg
from kvreplay.links import RequestLinks, Touch
from kvreplay.loading import Entry, LogSet, open_logs
from kvreplay.requests import read_requests
from kvreplay.routes import Routes
from kvreplay.story import tell
from kvsched.core import events as sched
from kvworker.core import events as work
from tests.kvreplay.drive.test_needs import key, record, told
from tests.kvreplay.pair import Pair

HISTORIES = Path(__file__).parents[1] / "histories"
#: With losses, late answers, preemption, cancelled and failed loads, and more than one engine.
NAMES = [
    "real/one-of-two-daemons-killed",
    "real/preempted",
    "real/aborted",
    "real/lease-expired",
    "real/engine-restarted",
    "real/asynchronous",
]


def crowd(directory: Path, number: int) -> LogSet:
    """So many requests that begin alike, and of which none ends."""
    pair = Pair(directory)
    pair.put("same", 2)
    for one in range(number):
        pair.add(f"req-{one}", 48, "same")
        pair.ask(f"req-{one}", 48)
    return pair.close()


def num_touches(logs: LogSet, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How often a request was asked whether a record is its, and how often one was."""
    real = RequestLinks.touch
    touches = []

    def touch(links: RequestLinks, entry: Entry) -> Touch:
        touches.append(real(links, entry))
        return touches[-1]

    with monkeypatch.context() as patched:
        patched.setattr(RequestLinks, "touch", touch)
        read_requests(logs)
    return len(touches), sum(map(bool, touches))


def test_work_grows_with_what_is_told_not_with_who_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, _ = num_touches(crowd(tmp_path / "few", 20), monkeypatch)
    many, told_of = num_touches(crowd(tmp_path / "many", 80), monkeypatch)
    assert many == 4 * few
    assert many == told_of


@pytest.mark.parametrize("name", NAMES)
def test_every_record_reaches_whom_it_touches(name: str) -> None:
    logs = open_logs([HISTORIES / name])
    stories = read_requests(logs)
    assert stories
    for story in stories:
        assert story.lines == tell(logs, story.request_id).lines, story.request_id


def test_numbers_lead_to_who_claimed_them_until_they_are_forgotten() -> None:
    routes = Routes()
    links = RequestLinks("a")
    links.claims = [("step", 3), ("w", 7), ("lookup", 2)]
    routes.follow(links)
    assert links.claims == []
    begun = record(work.ModelSaid(now_ns=1, engine="e#0", epoch=1, body=msg.StepBegun(step=3)))
    closed = record(work.GetsClosed(now_ns=1, op=7))
    assert routes.of(begun) == routes.of(closed) == {"a"}
    assert routes.of(record(work.GetsClosed(now_ns=1, op=8))) == set()
    assert routes.of(record(told(msg.ReleaseLookup(lookup_id=2)))) == {"a"}
    routes.forget("a")
    assert routes.of(begun) == set()
    links.ops, links.steps = {("w", 7)}, {3: {1}}
    links.claim_again()
    routes.follow(links)
    assert routes.of(begun) == routes.of(closed) == {"a"}


def test_what_may_be_anybodys_goes_to_all_and_invalid_blocks_to_who_loads() -> None:
    routes = Routes()
    lost = work.PeerLost(now_ns=1, engine="e#0", role="model", epoch=1, reason="gone")
    assert routes.of(record(lost)) is None
    loading, idle = RequestLinks("a"), RequestLinks("b")
    loading._gets = {("w", key(b"x"))}
    routes.follow(loading)
    routes.follow(idle)
    failed = sched.StepFinished(now_ns=1, step=1, invalid_block_ids=(5,))
    assert routes.of(record(failed)) == {"a"}
    assert routes.of(record(sched.StepFinished(now_ns=1, step=1))) == set()
    loading._gets.clear()
    routes.follow(loading)
    assert routes.of(record(failed)) == set()
