from hypothesis import given
from hypothesis import strategies as st

from kvsched.core.config import CoreConfig
from kvsched.core.jobs import Job, JobKind, Ledger
from kvsched.core.planning import SavePlan, block_limit, plan_saves, rewrite, savable_end
from kvsched.core.requests import RequestRecord, SaveBar
from tests.support.schedplay import hashes, more, new

CONFIG = CoreConfig(block_size=16)


def record(num_tokens: int = 100, num_blocks: int = 7) -> RequestRecord:
    return RequestRecord(
        request_id="a",
        serial=1,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        hashes=list(hashes(num_tokens // 16)),
        blocks=list(range(1, num_blocks + 1)),
    )


def indices(plan: SavePlan) -> list[int]:
    return [block_id - 1 for part in plan.parts for block_id in part.block_ids]


def plan(
    request: RequestRecord,
    computed: int,
    count: int,
    *,
    ledger: Ledger | None = None,
    spoilt: set[int] | None = None,
) -> SavePlan:
    step = more("a", computed, count)
    return plan_saves(request, step, CONFIG, ledger or Ledger(), spoilt or set())


@given(st.data(), st.integers(1, 200), st.integers(1, 17))
def test_chunks_of_any_size_leave_neither_holes_nor_doubles(
    data: st.DataObject, num_tokens: int, size: int
) -> None:
    config = CoreConfig(block_size=size, max_held_blocks=1000)
    request = record(num_tokens, num_tokens // size + 1)
    request.hashes = list(hashes(num_tokens // size))
    computed = 0
    saved: list[int] = []
    while computed < num_tokens:
        count = data.draw(st.integers(1, num_tokens - computed))
        found = plan_saves(request, more("a", computed, count), config, Ledger(), set())
        saved += indices(found)
        request.saved_until = found.saved_until
        computed += count
        assert request.saved_until == computed // size
    assert saved == list(range(num_tokens // size))


def test_a_block_needs_to_be_full_hashed_placed_and_part_of_the_prompt() -> None:
    request = record(100)
    assert savable_end(request, more("a", 0, 47), CONFIG) == 2
    assert savable_end(request, more("a", 0, 48), CONFIG) == 3
    assert savable_end(request, more("a", 100, 60), CONFIG) == 6
    request.blocks = [1, 2]
    assert savable_end(request, more("a", 0, 100), CONFIG) == 2
    request.blocks = list(range(9))
    request.hashes = request.hashes[:1]
    assert savable_end(request, more("a", 0, 100), CONFIG) == 1


def test_the_limit_follows_role_and_decode() -> None:
    request = record(100)
    assert block_limit(request, CONFIG) == 6
    request.hashes += hashes(3, "more")
    assert block_limit(request, CoreConfig(save_decode=True)) == 9
    assert block_limit(request, CoreConfig(can_save=False)) == 0
    request.abandoned = True
    assert block_limit(request, CONFIG) == 0


def test_only_what_this_request_completed_before_counts_as_computed() -> None:
    request = record(100)
    request.full_seen = 2
    found = plan(request, 48, 16)
    assert [(part.first_block, part.computed) for part in found.parts] == [(0, True), (2, False)]
    # After a roll-back less is there than was seen.
    found = plan(request, 16, 48)
    assert [(part.first_block, part.computed) for part in found.parts] == [(0, True), (1, False)]


def test_a_barred_request_saves_nothing() -> None:
    request = record(100)
    request.save_bar = SaveBar.UNTIL_REPLACED
    assert plan(request, 0, 100).parts == ()


def test_keys_in_other_saves_are_passed_over_but_revoked_ones_waited_for() -> None:
    request = record(100)
    ledger = Ledger()
    job = Job(
        job_id=ledger.new_id(),
        kind=JobKind.SAVE,
        step=1,
        request_id="b",
        serial=2,
        first_block=2,
        block_ids=(50,),
        block_hashes=(request.hashes[2],),
        waiting=[0],
    )
    ledger.add(job)
    found = plan(request, 0, 100, ledger=ledger)
    assert (indices(found), found.saved_until) == ([0, 1, 3, 4, 5], 6)
    job.tainted = True
    found = plan(request, 0, 100, ledger=ledger)
    assert (indices(found), found.saved_until, found.num_deferred) == ([0, 1], 2, 4)


def test_nothing_after_a_spoilt_block_is_saved() -> None:
    found = plan(record(100), 0, 100, spoilt={3})
    assert (indices(found), found.num_deferred, found.num_skipped) == ([0, 1], 4, 0)


def test_writing_anew_from_right_blocks_heals_in_any_order() -> None:
    one, two = record(100), record(100)
    two.request_id = "b"
    two.blocks = [1, 2, 3, 24, 25]
    spoilt = dict.fromkeys([2, 3, 24, 99], 0)
    rewrite(spoilt, [(two, new("b", (), 48, 32)), (one, new("a", (), 16, 32))], 16)
    assert spoilt == {99: 0}


def test_writing_on_top_of_a_spoilt_block_heals_nothing() -> None:
    spoilt = {2: 0}
    rewrite(spoilt, [(record(100), more("a", 17, 10))], 16)
    assert spoilt == {2: 0}
    rewrite(spoilt, [(record(100), more("a", 40, 20))], 16)
    assert spoilt == {2: 0, 3: 8, 4: 0}


def test_a_block_is_healed_when_it_is_written_to_its_end() -> None:
    spoilt = {2: 0, 3: 0}
    rewrite(spoilt, [(record(100), more("a", 16, 20))], 16)
    assert spoilt == {3: 4}
    rewrite(spoilt, [(record(100), more("a", 36, 6))], 16)
    assert spoilt == {3: 10}
    rewrite(spoilt, [(record(100), more("a", 43, 2))], 16)
    assert spoilt == {3: 10}
    rewrite(spoilt, [(record(100), more("a", 42, 9))], 16)
    assert spoilt == {}
