import threading
from typing import Any

from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO
from kvworker.stores.mooncake_client import MooncakeClient
from kvworker.stores.mooncake_codes import NO_ANSWER, RPC_FAIL


class Library:
    """A client library that answers what it is told to."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"batch_is_exist": [0]}
        self.calls: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.entered = threading.Event()

    def __getattr__(self, method: str) -> Any:
        def answer(*args: Any) -> Any:
            self.calls.append(method)
            self.entered.set()
            self.hold.wait()
            return self.answers.get(method, 0)

        return answer


def test_an_answer_of_the_wrong_length_is_no_answer() -> None:
    library = Library()
    client = MooncakeClient(library)
    for answer in ([], [0], [0, 0, 0], None, -1):
        library.answers["batch_put_session_end"] = answer
        result = client.codes("batch_put_session_end", ["a", "b"])
        assert result == ([RPC_FAIL] * 2 if answer is None else [NO_ANSWER] * 2)
    library.answers["batch_put_session_end"] = [0, -705]
    assert client.codes("batch_put_session_end", ["a", "b"]) == [0, -705]


def test_no_keys_no_call() -> None:
    library = Library()
    assert MooncakeClient(library).codes("batch_is_exist", []) == []
    assert library.calls == []


def test_nothing_is_called_after_close() -> None:
    library = Library()
    client = MooncakeClient(library)
    assert client.close(["put"], ["get"])
    assert library.calls == [
        "batch_is_exist",
        "batch_put_session_revoke",
        "batch_get_session_end",
        "close",
    ]
    assert client.closed
    assert client.call("get_hostname") is None
    assert client.codes("batch_is_exist", ["a", "b"]) == [RPC_FAIL] * 2
    assert client.transfer("ranges", [RangeIO("a", [1], [1], [0])]) == [RPC_FAIL]
    assert client.close([], [])
    assert library.calls[-1] == "close"


def test_a_client_that_was_never_connected_is_closed() -> None:
    client = MooncakeClient()
    assert client.closed
    assert client.codes("batch_is_exist", ["a"]) == [RPC_FAIL]


def test_closing_waits_for_running_calls() -> None:
    library = Library()
    client = MooncakeClient(library)
    library.hold.clear()
    caller = threading.Thread(target=client.call, args=("slow",))
    caller.start()
    library.entered.wait()
    closer = threading.Thread(target=client.close, args=([], []))
    closer.start()
    while not client.closed:
        pass
    assert library.calls == ["slow"]
    library.hold.set()
    caller.join()
    closer.join()
    assert library.calls == ["slow", "batch_is_exist", "close"]


def test_a_client_whose_master_is_gone_is_left_alone() -> None:
    library = Library()
    library.answers["batch_is_exist"] = [RPC_FAIL]
    assert not MooncakeClient(library).close(["put"], [])
    assert library.calls == ["batch_is_exist"]


def test_round_trips_to_the_master_are_counted() -> None:
    library = Library()
    client = MooncakeClient(library)
    client.codes("batch_is_exist", ["a"])
    client.codes("batch_put_from_multi_buffers", ["a"], [[1]], [[1]], None)
    client.call("batch_get_session_end", ["a"])
    client.note("find", [Outcome.OK, Outcome.MISS])
    counters = client.counters()
    assert counters["master_calls"] == 3
    assert counters["keys_batch_is_exist"] == counters["calls_batch_is_exist"] == 1
    assert counters["outcomes_find_ok"] == counters["outcomes_find_miss"] == 1
