"""The order of a clock's calls; what events do on a device is shown by ``make test-npu``."""

import contextlib
from collections.abc import Iterator

from kvcommon.memory.clock import MIN_SLOTS, EventClock


class Event:
    """Writes down what is asked of it."""

    made = 0

    def __init__(self, runtime: "Runtime", options: dict[str, bool]) -> None:
        Event.made += 1
        self.name = f"e{Event.made}"
        self.options = options
        self._calls = runtime.calls

    def record(self) -> None:
        self._calls.append(f"record {self.name}")

    def wait(self, stream: str) -> None:
        self._calls.append(f"wait {self.name} on {stream}")

    def synchronize(self) -> None:
        self._calls.append(f"synchronize {self.name}")

    def ipc_handle(self) -> bytes:
        self._calls.append(f"handle {self.name}")
        return self.name.encode()


class Runtime:
    """As much of ``torch.npu`` as a clock uses."""

    def __init__(self) -> None:
        Event.made = 0
        self.calls: list[str] = []
        self.device_set = -1

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.device_set = index
        yield

    def set_device(self, index: int) -> None:
        self.device_set = index

    def Event(self, **options: bool) -> Event:  # noqa: N802
        return Event(self, options)

    def Stream(self) -> str:  # noqa: N802
        return "side"


def test_a_handle_is_given_out_after_its_record_has_left_the_queue() -> None:
    runtime = Runtime()
    clock = EventClock(runtime, 3, 1, interprocess=True)
    assert runtime.device_set == 3
    first, second = clock.stamp(), clock.stamp()
    assert runtime.calls == ["record e1", "record e2"]
    assert clock.settle(first, shared=True) == b"e1"
    assert runtime.calls[2:] == ["wait e1 on side", "handle e1"]
    assert clock.settle(second, shared=True) == b"e2"


def test_a_slot_that_comes_round_keeps_its_handle_but_waits_again() -> None:
    runtime = Runtime()
    clock = EventClock(runtime, 0, 1, interprocess=True)
    clock.settle(clock.stamp(), shared=True)
    for _ in range(MIN_SLOTS - 1):
        clock.stamp()
    del runtime.calls[:]
    assert clock.settle(clock.stamp(), shared=True) == b"e1"
    assert runtime.calls == ["record e1", "wait e1 on side"]


def test_where_events_cannot_be_shared_the_host_waits() -> None:
    for interprocess, shared in ((False, True), (True, False), (False, False)):
        runtime = Runtime()
        clock = EventClock(runtime, 0, 1, interprocess=interprocess)
        assert clock.settle(clock.stamp(), shared=shared) == b""
        assert runtime.calls == ["record e1", "synchronize e1"]
        assert clock._events[0].options == ({"interprocess": True} if interprocess else {})


def test_the_helper_gets_the_device() -> None:
    runtime = Runtime()
    clock = EventClock(runtime, 2, 1, interprocess=False)
    runtime.device_set = -1
    clock.bind_thread()
    assert runtime.device_set == 2
