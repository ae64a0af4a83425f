"""Answers that a healthy Mooncake does not give, from a library that says what it is told to."""

import collections
from typing import Any

from kvcommon.config import MooncakeConfig
from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO
from kvworker.stores.mooncake import MooncakeStore
from kvworker.stores.mooncake_client import MooncakeClient

OK, EXISTS, FULL, FAILED, DOWN = (
    Outcome.OK,
    Outcome.EXISTS,
    Outcome.FULL,
    Outcome.FAILED,
    Outcome.DOWN,
)


class Scripted:
    """Gives the scripted answers of a method in turn; 0 for every key after that."""

    def __init__(self) -> None:
        self.script: dict[str, list[Any]] = collections.defaultdict(list)
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, method: str) -> Any:
        def answer(*args: Any) -> Any:
            self.calls.append((method, args[0] if args else None))
            return self.script[method].pop(0) if self.script[method] else [0] * len(args[0])

        return answer


def _store() -> tuple[MooncakeStore, Scripted]:
    store = MooncakeStore(MooncakeConfig(master_server_address="127.0.0.1:1"))
    library = Scripted()
    store._client = MooncakeClient(library)
    return store, library


def _piece(key: str, count: int = 1) -> RangeIO:
    return RangeIO(key, [64] * count, [1] * count, list(range(count)))


def test_a_full_store_is_asked_once_more() -> None:
    store, library = _store()
    library.script["batch_put_session_start"] = [[0, -200, -200], [0, -200]]
    assert store.put_start(["a", "b", "c"], [1, 1, 1]) == [OK, OK, FULL]
    assert [keys for _, keys in library.calls] == [["a", "b", "c"], ["b", "c"]]
    library.script["batch_put_session_start"] = [[0]]
    assert store.put_start(["c"], [1]) == [OK], "a refused key is free"


def test_a_session_that_only_the_library_remembers_is_revoked() -> None:
    store, library = _store()
    library.script["batch_put_session_start"] = [[-600, 0]]
    assert store.put_start(["forgotten", "new"], [1, 1]) == [EXISTS, OK]
    assert library.calls[-1] == ("batch_put_session_revoke", ["forgotten"])
    assert store.put_start(["forgotten"], [1]) == [OK]


def test_an_object_that_cannot_be_ended_is_revoked_unless_the_master_is_gone() -> None:
    store, library = _store()
    keys = ["a", "b", "c"]
    store.put_start(keys, [1, 1, 1])
    library.script["batch_put_from_multi_buffer_ranges"] = [[1, 1, 1]]
    store.put_ranges([_piece(key) for key in keys])
    library.script["batch_put_session_end"] = [[0, -702, -900]]
    assert store.put_end(keys) == [OK, FAILED, DOWN]
    assert library.calls[-1] == ("batch_put_session_revoke", ["b"])


def test_a_transfer_of_the_wrong_size_is_a_failure() -> None:
    store, library = _store()
    store.put_start(["a"], [2])
    library.script["batch_put_from_multi_buffer_ranges"] = [[1], [2]]
    assert store.put_ranges([_piece("a", 2)]) == [FAILED]
    assert store.put_end(["a"]) == [FAILED], "its bytes were not counted"
    store.get_start(["b"])
    library.script["batch_get_into_multi_buffer_ranges"] = [[1]]
    assert store.get_ranges([_piece("b", 2)]) == [FAILED]


def test_a_lapsed_session_is_opened_again_once() -> None:
    store, library = _store()
    store.get_start(["a", "b", "c"])
    library.script["batch_get_into_multi_buffer_ranges"] = [[-707, 1, -600], [-707]]
    library.script["batch_get_session_start"] = [[0, -704]]
    answer = store.get_ranges([_piece("a"), _piece("b"), _piece("c")])
    assert answer == [Outcome.EXPIRED, OK, Outcome.MISS]
    assert [method for method, _ in library.calls[-4:]] == [
        "batch_get_session_start",
        "batch_get_into_multi_buffer_ranges",
        "batch_get_session_start",
        "batch_get_into_multi_buffer_ranges",
    ]


def test_whole_objects_go_in_calls_of_at_most_1024_buffers() -> None:
    store, library = _store()
    counts = [500, 524, 1, 2000, 3]
    pieces = [_piece(f"k{i}", count) for i, count in enumerate(counts)]
    assert store.put_objects(pieces) == [OK] * 5
    assert [keys for _, keys in library.calls] == [["k0", "k1"], ["k2"], ["k3"], ["k4"]]


def test_a_short_answer_fails_every_key() -> None:
    store, library = _store()
    library.script["batch_put_session_start"] = [[]]
    assert store.put_start(["a", "b"], [1, 1]) == [FAILED, FAILED]
    library.script["batch_is_exist"] = [[1]]
    assert store.find(["a", "b"]) == [FAILED, FAILED]


def test_a_store_that_is_not_open_is_down() -> None:
    store = MooncakeStore(MooncakeConfig(master_server_address="127.0.0.1:1"))
    assert store.find(["a"]) == [DOWN]
    assert store.put_start(["a"], [1]) == [DOWN]
    assert not store.register(4096, 4096)
    store.close()
