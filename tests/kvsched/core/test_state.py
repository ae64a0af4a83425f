import pytest

from kvcommon.messages import ResetStore
from kvsched.core.commands import SendToDaemon
from kvsched.core.config import CoreConfig
from kvsched.core.requests import PendingLoad, RequestRecord, SaveBar
from kvsched.core.state import CoreState
from tests.support.schedplay import hashes


def added(state: CoreState, num_tokens: int = 64) -> RequestRecord:
    return state.add_request("a", num_tokens, hashes(num_tokens // 16), skip_lookup=False)


def test_a_request_is_active_until_all_is_planned_and_its_table_is_known() -> None:
    state = CoreState(CoreConfig())
    record = added(state)
    assert "a" in state.active
    record.saved_until = 4
    state.refresh_active(record)
    assert "a" in state.active
    record.set_blocks((1, 2, 3, 4))
    state.refresh_active(record)
    assert "a" not in state.active
    state.bar(record, 2)
    assert "a" in state.active
    assert state.counters["requests_barred"] == 1
    state.bar(record, 1)
    assert state.counters["requests_barred"] == 1


def test_a_pending_load_keeps_a_consumers_request_active() -> None:
    state = CoreState(CoreConfig(can_save=False))
    record = added(state)
    assert "a" not in state.active
    state.pending["a"] = PendingLoad(
        request_id="a",
        serial=record.serial,
        first_block=0,
        block_ids=(1,),
        block_hashes=hashes(1),
        asynchronous=False,
        lookup_id=1,
    )
    state.refresh_active(record)
    assert "a" in state.active


@pytest.mark.parametrize("why", ["abandoned", "barred"])
def test_what_will_not_be_saved_is_not_active(why: str) -> None:
    state = CoreState(CoreConfig(save_decode=True))
    record = added(state)
    if why == "abandoned":
        record.abandoned = True
    else:
        record.save_bar = SaveBar.UNTIL_PREEMPTED
    state.refresh_active(record)
    assert "a" not in state.active


def test_a_record_is_found_by_its_serial() -> None:
    state = CoreState(CoreConfig())
    old = added(state)
    record = added(state)
    assert state.find("a", old.serial) is None
    assert state.find("a", record.serial) is record
    assert state.find("b", record.serial) is None


def test_who_cannot_be_reached_is_told_nothing() -> None:
    state = CoreState(CoreConfig())
    state.ranks.named = (0, 1)
    state.ranks.get(1).lost = False
    assert state.send_all(state.ranks.all(), ResetStore()) == [
        SendToDaemon(rank=1, body=ResetStore())
    ]
