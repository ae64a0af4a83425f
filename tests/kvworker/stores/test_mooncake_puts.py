"""Saving with answers that a healthy Mooncake does not give."""

from kvworker.outcome import Outcome
from tests.support.scriptedlibrary import byte_pieces, scripted_store

OK, EXISTS, FULL, FAILED, DOWN = (
    Outcome.OK,
    Outcome.EXISTS,
    Outcome.FULL,
    Outcome.FAILED,
    Outcome.DOWN,
)


def test_a_full_store_is_asked_once_more() -> None:
    store, library = scripted_store()
    library.script["batch_put_session_start"] = [[0, -200, -200], [0, -200]]
    assert store.put_start(["a", "b", "c"], [1, 1, 1]) == [OK, OK, FULL]
    assert [keys for _, keys in library.calls] == [["a", "b", "c"], ["b", "c"]]
    library.script["batch_put_session_start"] = [[0]]
    assert store.put_start(["c"], [1]) == [OK], "a refused key is free"


def test_a_session_that_only_the_library_remembers_is_revoked() -> None:
    store, library = scripted_store()
    library.script["batch_put_session_start"] = [[-600, 0]]
    assert store.put_start(["forgotten", "new"], [1, 1]) == [EXISTS, OK]
    assert library.calls[-1] == ("batch_put_session_revoke", ["forgotten"])
    assert store.put_start(["forgotten"], [1]) == [OK]


def test_an_object_that_cannot_be_ended_is_revoked_unless_the_master_is_gone() -> None:
    store, library = scripted_store()
    keys = ["a", "b", "c"]
    store.put_start(keys, [1, 1, 1])
    library.script["batch_put_from_multi_buffer_ranges"] = [[1, 1, 1]]
    store.put_ranges([byte_pieces(key) for key in keys])
    library.script["batch_put_session_end"] = [[0, -702, -900]]
    assert store.put_end(keys) == [OK, FAILED, DOWN]
    assert library.calls[-1] == ("batch_put_session_revoke", ["b"])


def test_whole_objects_go_in_calls_of_at_most_1024_buffers() -> None:
    store, library = scripted_store()
    counts = [500, 524, 1, 2000, 3]
    pieces = [byte_pieces(f"k{i}", count) for i, count in enumerate(counts)]
    assert store.put_objects(pieces) == [OK] * 5
    assert [keys for _, keys in library.calls] == [["k0", "k1"], ["k2"], ["k3"], ["k4"]]
