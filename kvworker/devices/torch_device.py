"""A device whose memory torch shares between processes: what NPU and CUDA have in common.

torch maps and unmaps; copies, streams, events and staging memory are the driver's. Each transfer
thread has a stream of its own, so loads never wait behind saves on the device either. A copy
returns when the device has done it.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvcommon.errors import ConfigError, DeviceError, HandleError, LocalProtocolError
from kvcommon.layout import GroupLayout
from kvcommon.memory import proof as patterns
from kvcommon.memory.cpu import map_handle
from kvcommon.memory.handles import LocalHandle, MemoryProof, StorageHandle
from kvcommon.memory.torch_ipc import (
    Family,
    check_handle,
    import_storages,
    release_storages,
    remove_dead_counters,
)
from kvworker.devices.base import Device, MappedStorage, Mapping, Packed, StagingMemory
from kvworker.devices.driver import Direction, Driver
from kvworker.devices.pieces import PieceTable, copies, packed_copies

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvferry.worker")

#: How long an event of another process may take to be opened and reached when that is tried out.
#: Some drivers never come back from it.
_PROBE_S = 5.0
#: Registration over HCCS wants device memory aligned to so much.
_HUGE = 2 << 20
#: (address in the KV cache, address outside, bytes).
_Copy = tuple[int, int, int]


class TorchMapping(Mapping):
    """Storages of an engine on a device."""

    def __init__(
        self,
        device: "TorchDevice",
        storages: "list[torch.UntypedStorage]",
        local: list[LocalHandle],
        handles: Sequence[StorageHandle] = (),
    ) -> None:
        """Take over storages imported by these handles, or addresses of ours."""
        self.handles = handles
        offsets = [getattr(handle, "offset", 0) for handle in handles]
        #: Where the allocations begin that were mapped with the storages.
        self.starts = [
            each.data_ptr() - offset for each, offset in zip(storages, offsets, strict=False)
        ]
        self._device = device
        self._imported = storages
        self.storages = [
            *(MappedStorage(each.data_ptr(), each.nbytes()) for each in storages),
            *(MappedStorage(each.address, each.size) for each in local),
        ]
        self.table = PieceTable(self.storages)
        #: Events of the engine that have been opened, by handle.
        self.events: dict[bytes, int] = {}
        self.lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Wait for the streams, then let go of events and memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self._device.release(self, self._imported)


class DriverStaging(StagingMemory):
    """Memory of the driver's: on the device, or pinned on the host."""

    def __init__(
        self, address: int, num_bytes: int, location: str, free: Callable[[], None]
    ) -> None:
        """``free`` gives it back."""
        self.address = address
        self.num_bytes = num_bytes
        self.location = location
        self._free: Callable[[], None] | None = free

    def close(self) -> None:
        """Give it back."""
        free, self._free = self._free, None
        if free is not None:
            free()


class TorchDevice(Device):
    """See the module docstring."""

    direct = False

    def __init__(self, name: str, family: Family, make_driver: Callable[[], Driver]) -> None:
        """``name`` is the kind and the card's *physical* number, ``npu:3``."""
        self.name = name
        self._family = family
        self._make_driver = make_driver
        self._physical = int(name.partition(":")[2])
        self.kind = self.location = family.kind
        self._local = threading.local()
        self._staging: list[DriverStaging] = []

    def open(self) -> None:
        """Load torch and the driver, and find the card.

        Raises:
            ConfigError: one of them is missing; says what to install or change.
        """
        try:
            runtime = self._family.runtime()
            self._driver = self._make_driver()
        except (HandleError, DeviceError) as error:
            raise ConfigError(f"device {self.name}: {error}") from error
        cards = [self._family.identity(index) for index in range(runtime.device_count())]
        numbers = [card.physical_id for card in cards]
        if self._physical not in numbers:
            raise ConfigError(
                f"device {self.name}: this process sees the cards {numbers}; cards are numbered "
                "physically, as the driver does, whatever the engine calls them"
            )
        #: The card as this process numbers it, and as everybody can tell it.
        self.index = numbers.index(self._physical)
        self.card = cards[self.index]

    def bind_thread(self) -> None:
        """Make the card this thread's, and give the thread a stream."""
        self._family.runtime().set_device(self.index)
        self._driver.bind(self.index)
        if not hasattr(self._local, "stream"):
            self._local.stream = self._driver.new_stream()

    @property
    def _stream(self) -> int:
        if not hasattr(self._local, "stream"):
            self.bind_thread()
        stream: int = self._local.stream
        return stream

    # -- an engine's memory --------------------------------------------------------------------

    def map(self, storages: Sequence[StorageHandle]) -> TorchMapping:
        """Import an engine's storages. Raises ``HandleError``; then nothing stays mapped."""
        if all(isinstance(handle, LocalHandle) for handle in storages):
            local = [handle for handle in storages if isinstance(handle, LocalHandle)]
            for handle in local:
                map_handle(handle)
            return TorchMapping(self, [], local)
        return TorchMapping(self, self._import(storages), [], storages)

    def _import(self, handles: Sequence[StorageHandle]) -> "list[torch.UntypedStorage]":
        checked = [check_handle(self._family, handle, self.card) for handle in handles]
        if len({(each.counter, each.counter_slot) for each in checked}) < len(checked):
            raise HandleError("a storage was exported once and named twice", "export it again")
        runtime = self._family.runtime()
        with runtime.device(self.index):
            storages = import_storages(self._family, self.index, checked)
            runtime.current_stream().synchronize()
        return storages

    def release(self, mapping: TorchMapping, storages: "list[torch.UntypedStorage]") -> None:
        """Let go of a mapping's events and storages (its own business)."""
        self.bind_thread()
        with mapping.lock:
            for event in mapping.events.values():
                self._driver.close_event(event)
            mapping.events.clear()
        if storages:
            release_storages(self._family, storages)
        remove_dead_counters(mapping.handles)

    def prove(self, proof: MemoryProof) -> bool:
        """Read the engine's scratch memory, and answer in it."""
        self.bind_thread()
        storages = self._import([proof.storage])
        try:
            address = storages[0].data_ptr()
            if storages[0].nbytes() < patterns.PROOF_BYTES:
                raise HandleError("the engine's scratch memory is too small")
            events = bool(proof.event) and self._reaches(proof.event)
            buffer = bytearray(patterns.PROOF_BYTES)
            self._exchange(buffer, address, Direction.FROM_DEVICE)
            if buffer != patterns.question(proof.nonce):
                cause = "what the engine wrote into its memory is not what this daemon reads there"
                raise HandleError(cause, "restart both; the daemon must be on the engine's card")
            buffer[:] = patterns.answer(proof.nonce)
            self._exchange(buffer, address, Direction.TO_DEVICE)
        except DeviceError as error:
            raise HandleError(f"the engine's memory cannot be used: {error}") from error
        finally:
            release_storages(self._family, storages)
        return events

    def _exchange(self, buffer: bytearray, address: int, direction: Direction) -> None:
        import ctypes

        host = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        to, source = (address, host) if direction is Direction.TO_DEVICE else (host, address)
        self._driver.copy_now(to, source, len(buffer), direction)

    def _reaches(self, handle: bytes) -> bool:
        """Try out an event of the engine, in a thread that may be left behind."""
        worked: list[bool] = []

        def attempt() -> None:
            try:
                self.bind_thread()
                event = self._driver.open_event(handle)
                self._driver.wait_event(self._stream, event)
                self._driver.synchronize(self._stream)
                self._driver.close_event(event)
                self._driver.free_stream(self._stream)
                worked.append(True)
            except DeviceError as error:
                _log.warning("events between processes do not work here: %s", error)

        thread = threading.Thread(target=attempt, name="event-probe", daemon=True)
        thread.start()
        thread.join(_PROBE_S)
        if thread.is_alive():
            _log.warning("the driver does not come back from an event; the engine waits itself")
        return bool(worked)

    # -- copies --------------------------------------------------------------------------------

    def wait(self, mapping: Mapping, event: bytes) -> None:
        """Let this thread's stream wait for an event of the engine."""
        if not event:
            return
        assert isinstance(mapping, TorchMapping)
        with mapping.lock:
            opened = mapping.events.get(event)
            if opened is None:
                opened = mapping.events[event] = self._driver.open_event(event)
            self._driver.wait_event(self._stream, opened)

    def settle(self) -> None:
        """Wait for this thread's stream."""
        self._driver.synchronize(self._stream)

    def regions(self, mapping: Mapping) -> Sequence[MappedStorage]:
        """The storages, from 2 MiB boundaries on: all of an allocation is mapped with them."""
        assert isinstance(mapping, TorchMapping)
        found: list[MappedStorage] = []
        begins = mapping.starts or [storage.address for storage in mapping.storages]
        for storage, begin in sorted(zip(mapping.storages, begins, strict=True)):
            address = max(storage.address // _HUGE * _HUGE, begin)
            end = storage.address + storage.size
            if found and address < found[-1].address + found[-1].size:
                last = found.pop()
                address, end = last.address, max(end, last.address + last.size)
            found.append(MappedStorage(address, end - address))
        return found

    def copy_in(
        self,
        mapping: Mapping,
        group: GroupLayout,
        layers: range,
        block_ids: Sequence[int],
        sources: Sequence[int],
    ) -> None:
        """Copy layers of objects at ``sources`` (host memory) into blocks."""
        assert isinstance(mapping, TorchMapping)
        pieces = mapping.table.pieces(group)
        for memory, host, length in self._after_events(copies(pieces, layers, block_ids, sources)):
            self._driver.copy_now(memory, host, length, Direction.TO_DEVICE)

    def copy_out(
        self,
        mapping: Mapping,
        group: GroupLayout,
        layers: range,
        block_ids: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        """Copy layers of blocks to objects at ``targets`` (host memory)."""
        assert isinstance(mapping, TorchMapping)
        pieces = mapping.table.pieces(group)
        for memory, host, length in self._after_events(copies(pieces, layers, block_ids, targets)):
            self._driver.copy_now(host, memory, length, Direction.FROM_DEVICE)

    def _after_events(self, wanted: Iterator[_Copy]) -> Iterator[_Copy]:
        """Memory that is not pinned is copied at once or not at all: no stream orders that.

        So what this thread's stream was told to wait for must have happened before.
        """
        self._driver.synchronize(self._stream)
        return wanted

    def scatter(self, mapping: Mapping, group: GroupLayout, layers: range, packed: Packed) -> None:
        """Copy layers from staging memory into blocks."""
        assert isinstance(mapping, TorchMapping)
        driver, stream = self._driver, self._stream
        on_device = self._is_on_device(packed.address)
        direction = Direction.ON_DEVICE if on_device else Direction.TO_DEVICE
        for memory, host, size in packed_copies(mapping.table.pieces(group), layers, packed):
            driver.copy(memory, host, size, direction, stream)
        driver.synchronize(stream)

    def gather(self, mapping: Mapping, group: GroupLayout, layers: range, packed: Packed) -> None:
        """Copy layers of blocks into staging memory."""
        assert isinstance(mapping, TorchMapping)
        driver, stream = self._driver, self._stream
        on_device = self._is_on_device(packed.address)
        direction = Direction.ON_DEVICE if on_device else Direction.FROM_DEVICE
        for memory, host, size in packed_copies(mapping.table.pieces(group), layers, packed):
            driver.copy(host, memory, size, direction, stream)
        driver.synchronize(stream)

    # -- staging -------------------------------------------------------------------------------

    def allocate_staging(self, num_bytes: int, *, on_device: bool) -> StagingMemory:
        """Allocate on the device if the store can move that, else pinned host memory."""
        self.bind_thread()
        driver = self._driver
        size = -(-num_bytes // _HUGE) * _HUGE
        where = self._family.kind if on_device else "cpu"
        try:
            address = driver.allocate(size) if on_device else driver.allocate_host(size)
        except DeviceError as error:
            cause = f"no {size} bytes of staging memory ({where}): {error}"
            remedy = "leave more memory free: lower vLLM's gpu_memory_utilization"
            raise HandleError(cause, remedy) from error

        def free() -> None:
            self.bind_thread()
            self._staging = [each for each in self._staging if each is not made]
            driver.free(address) if on_device else driver.free_host(address)

        made = DriverStaging(address, size, where, free)
        self._staging = [*self._staging, made]
        return made

    def _is_on_device(self, address: int) -> bool:
        for staging in self._staging:
            if staging.address <= address < staging.address + staging.num_bytes:
                return staging.location != "cpu"
        raise LocalProtocolError(f"{address:#x} is no staging memory of {self.name}")
