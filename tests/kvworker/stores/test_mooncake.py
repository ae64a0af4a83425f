"""Answers that a healthy Mooncake does not give, from a library that says what it is told to."""

from types import SimpleNamespace
from typing import Any

from kvcommon.config import MooncakeConfig
from kvworker.outcome import Outcome
from kvworker.stores.mooncake import MooncakeStore
from tests.support.scriptedlibrary import byte_pieces, scripted_store

OK, FAILED, DOWN = Outcome.OK, Outcome.FAILED, Outcome.DOWN


def test_a_transfer_of_the_wrong_size_is_a_failure() -> None:
    store, library = scripted_store()
    store.put_start(["a"], [2])
    library.script["batch_put_from_multi_buffer_ranges"] = [[1], [2]]
    assert store.put_ranges([byte_pieces("a", 2)]) == [FAILED]
    assert store.put_end(["a"]) == [FAILED], "its bytes were not counted"
    store.get_start(["b"])
    library.script["batch_get_into_multi_buffer_ranges"] = [[1]]
    assert store.get_ranges([byte_pieces("b", 2)]) == [FAILED]


def test_a_lapsed_session_is_opened_again_once() -> None:
    store, library = scripted_store()
    store.get_start(["a", "b", "c"])
    library.script["batch_get_into_multi_buffer_ranges"] = [[-707, 1, -600], [-707]]
    library.script["batch_get_session_start"] = [[0, -704]]
    answer = store.get_ranges([byte_pieces("a"), byte_pieces("b"), byte_pieces("c")])
    assert answer == [Outcome.EXPIRED, OK, Outcome.MISS]
    assert [method for method, _ in library.calls[-4:]] == [
        "batch_get_session_start",
        "batch_get_into_multi_buffer_ranges",
        "batch_get_session_start",
        "batch_get_into_multi_buffer_ranges",
    ]


def test_a_short_answer_fails_every_key() -> None:
    store, library = scripted_store()
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


def _descriptors(**sizes: int) -> dict[str, Any]:
    """Replicas of these sizes, in the memory of another process."""
    answer = {}
    for key, size in sizes.items():
        buffer = SimpleNamespace(size=size, buffer_address=64, transport_endpoint="elsewhere")
        descriptor = SimpleNamespace(buffer_descriptor=buffer)
        replica = SimpleNamespace(
            is_memory_replica=lambda: True,
            get_memory_descriptor=lambda descriptor=descriptor: descriptor,
        )
        answer[key] = [replica]
    return answer


def test_an_object_of_the_wrong_size_is_not_asked_for_again() -> None:
    store, library = scripted_store()
    library.script["batch_get_replica_desc"] = [_descriptors(a=8, b=9, c=8)]
    assert store.get_start(["a", "b", "c"], [8, 8, 8]) == [OK, Outcome.MISS, OK]
    assert library.calls[-1] == ("batch_get_session_end", ["b"])
    library.script["batch_is_exist"] = [[1, 1]]
    assert store.find(["a", "b", "c"]) == [OK, Outcome.MISS, OK]
    assert library.calls[-1] == ("batch_is_exist", ["a", "c"]), "that would take its lease"
    store.put_start(["b"], [1])
    library.script["batch_put_from_multi_buffer_ranges"] = [[1]]
    store.put_ranges([byte_pieces("b")])
    assert store.put_end(["b"]) == [OK]
    library.script["batch_is_exist"] = [[1]]
    assert store.find(["b"]) == [OK], "it was stored anew"
    assert store.metrics()["objects_of_wrong_size"] == 1


def test_an_object_whose_size_cannot_be_learnt_is_read() -> None:
    store, library = scripted_store()
    library.script["batch_get_replica_desc"] = [{"b": []}, None]
    assert store.get_start(["a", "b"], [8, 8]) == [OK, OK]
    assert store.get_start(["c"], [8]) == [OK]
