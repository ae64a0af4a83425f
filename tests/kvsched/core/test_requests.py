from kvsched.core.requests import LookupRecord, RequestRecord, SaveBar
from kvsched.core.states import LookupMove, LookupState
from tests.support.schedplay import hashes


def record(num_tokens: int = 64) -> RequestRecord:
    return RequestRecord(
        request_id="a",
        serial=1,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        hashes=list(hashes(num_tokens // 16)),
    )


def test_a_longer_block_table_is_appended_to_so_that_snapshots_hold() -> None:
    request = record()
    request.set_blocks((1, 2))
    snapshot = request.blocks
    request.set_blocks((1, 2, 3))
    assert request.blocks is snapshot
    assert snapshot == [1, 2, 3]


def test_another_block_table_replaces_the_old_one_and_leaves_snapshots_alone() -> None:
    request = record()
    request.set_blocks((1, 2))
    snapshot = request.blocks
    request.set_blocks((5, 2, 3))
    assert snapshot == [1, 2]
    request.set_blocks((5,))
    assert request.blocks == [5]
    request.clear_blocks()
    assert request.blocks == []


def test_hashes_that_go_on_keep_the_progress() -> None:
    request = record()
    request.saved_until = 3
    assert request.set_hashes(hashes(6))
    assert (len(request.hashes), request.saved_until) == (6, 3)
    assert not request.set_hashes(hashes(6, "q"))
    assert request.saved_until == 0
    assert not request.set_hashes(hashes(2, "q"))
    assert request.hashes == list(hashes(2, "q"))


def test_rolling_back_never_goes_forward() -> None:
    request = record()
    request.stored_until, request.saved_until, request.full_seen = 1, 4, 3
    assert request.next_save == 4
    request.roll_back(2)
    assert (request.stored_until, request.saved_until, request.full_seen) == (1, 2, 2)


def test_losing_the_blocks_lifts_the_bar_on_saving() -> None:
    request = record()
    request.save_bar = SaveBar.UNTIL_PREEMPTED
    request.clear_blocks()
    assert request.save_bar is SaveBar.NONE


def test_a_lookup_moves_along_the_table() -> None:
    lookup = LookupRecord()
    lookup.move("a", LookupMove.SEND)
    assert lookup.state is LookupState.PENDING
