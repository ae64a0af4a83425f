"""Says to another process how far a device is: events, or the host's word after them.

``save_kv_layer`` returns when a kernel is *queued*. Whoever reads the layer must wait for the
device, and only the process that queued the kernel can say where in its stream that is. It does so
in two parts: ``stamp`` marks the place and never waits; ``settle`` returns what another process
needs to wait for that place, and may take as long as the device does.

Threading: ``stamp`` is called by the thread that runs the model; ``settle`` by one helper thread,
in the order of the stamps.
"""

from abc import ABC, abstractmethod
from typing import Any

#: Stamps that can be under way before a slot of the ring is used again.
MIN_SLOTS, MAX_SLOTS = 64, 512


class DeviceClock(ABC):
    """Marks places in a device's current stream."""

    @abstractmethod
    def stamp(self) -> int:
        """Mark the present place of this thread's current stream. Never waits."""

    @abstractmethod
    def settle(self, stamp: int, *, shared: bool) -> bytes:
        """Return what to send with a message about the place that ``stamp`` marked.

        Args:
            stamp: Of the place.
            shared: The other process can wait for events (it has proved that).

        Returns:
            An event's handle, which it waits for; or nothing: the device has passed the place.
        """

    @abstractmethod
    def bind_thread(self) -> None:
        """Give the helper thread the device's context."""


class EventClock(DeviceClock):
    """A ring of torch events.

    A slot is used again after ``num_slots`` stamps. Whoever still waits for the older place then
    waits for the newer one, which is later: never too short.
    """

    def __init__(
        self,
        runtime: Any,  # noqa: ANN401 - torch.npu has no types
        index: int,
        num_slots: int,
        *,
        interprocess: bool,
    ) -> None:
        """Make the ring.

        Args:
            runtime: ``torch.npu`` or ``torch.cuda``.
            index: The device, as this process numbers it.
            num_slots: More than the messages of one step, so that no wait is longer than it must.
            interprocess: Events can be shared (the device supports it).
        """
        self._runtime = runtime
        self._index = index
        self._interprocess = interprocess
        count = min(max(num_slots, MIN_SLOTS), MAX_SLOTS)
        options = {"interprocess": True} if interprocess else {}
        with runtime.device(index):
            self._events = [runtime.Event(**options) for _ in range(count)]
            self._side = runtime.Stream()
        self._handles: list[bytes] = [b""] * count
        self._count = 0

    def stamp(self) -> int:
        """Record the next event of the ring."""
        stamp = self._count
        self._count += 1
        self._events[stamp % len(self._events)].record()
        return stamp

    def settle(self, stamp: int, *, shared: bool) -> bytes:
        """Wait for the record to leave torch's queue, or for the device to pass it."""
        slot = stamp % len(self._events)
        event = self._events[slot]
        if not (shared and self._interprocess):
            event.synchronize()
            return b""
        # torch_npu queues what it is told, the record too. An event whose record has not reached
        # the device yet is one that nobody waits for. Waiting on a stream of our own returns once
        # the record is there, without the interpreter's lock; asking for the handle would hold it.
        event.wait(self._side)
        if not self._handles[slot]:
            self._handles[slot] = bytes(event.ipc_handle())
        return self._handles[slot]

    def bind_thread(self) -> None:
        """Make the device this thread's."""
        self._runtime.set_device(self._index)
