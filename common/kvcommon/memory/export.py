"""The model side's half of a device: export storages, prove them, say how far the device is.

One class per way to share memory; ``make_exporter`` picks. Nothing of a device is loaded before a
storage of that device is there.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcommon.errors import HandleError
from kvcommon.memory import proof
from kvcommon.memory.clock import DeviceClock, EventClock
from kvcommon.memory.cpu import export_storages, local_handles
from kvcommon.memory.handles import DeviceHandle, MemoryProof, StorageHandle
from kvcommon.memory.torch_ipc import Family, export_storage

if TYPE_CHECKING:
    import torch


class Exporter(ABC):
    """Shares the storages of one rank, again for every attach. Keeps them alive.

    Threading: made by the thread that registers the KV cache; ``handles``, ``proof`` and ``proven``
    are then called by the thread that attaches, after ``bind_thread``.
    """

    #: The device as daemons are named, ``npu:3`` with the physical id; empty: the caller's choice.
    device = ""

    @abstractmethod
    def prepare(self) -> None:
        """Do what must be done before the first step, and find out early what cannot work.

        Raises:
            HandleError: the memory cannot be shared.
        """

    def bind_thread(self) -> None:  # noqa: B027 - the CPU has nothing to bind
        """Make the device the calling thread's, which must be one of ours, not the model's."""

    @abstractmethod
    def handles(self) -> tuple[StorageHandle, ...]:
        """Export every storage for one attach. Raises ``HandleError``."""

    def proof(self) -> MemoryProof | None:
        """Scratch memory for one attach; None where the progress page proves enough."""
        return None

    def proven(self) -> bool:
        """Say whether the daemon has answered in the scratch memory of the last ``proof``."""
        return True

    def clock(self, num_slots: int) -> DeviceClock | None:
        """Return the device's clock; None where what was stored before it was said is there."""
        del num_slots
        return None


class CpuExporter(Exporter):
    """CPU memory for another process."""

    def __init__(self, storages: Sequence["torch.UntypedStorage"]) -> None:
        self._storages = storages

    def prepare(self) -> None:
        """Move the storages to shared memory, which must not happen during a step."""
        export_storages(self._storages)

    def handles(self) -> tuple[StorageHandle, ...]:
        """The same files each time."""
        return export_storages(self._storages)


class LocalExporter(Exporter):
    """Memory of any device for a daemon in this process (inline mode)."""

    def __init__(
        self, storages: Sequence["torch.UntypedStorage"], family: Family | None = None
    ) -> None:
        self._storages = storages
        self._family = family
        if family is not None:
            self._index = storages[0].device.index
            self.device = f"{family.kind}:{family.identity(self._index).physical_id}"

    def prepare(self) -> None:
        """Nothing to do."""

    def handles(self) -> tuple[StorageHandle, ...]:
        """Addresses."""
        return local_handles(self._storages)

    def clock(self, num_slots: int) -> DeviceClock | None:
        """Events of this process, waited for by the host."""
        if self._family is None:
            return None
        runtime = self._family.runtime()
        return EventClock(runtime, self._index, num_slots, interprocess=False)


class DeviceExporter(Exporter):
    """Memory of an NPU or a CUDA device for another process."""

    def __init__(self, family: Family, storages: Sequence["torch.UntypedStorage"]) -> None:
        """Take distinct storages of one device.

        The scratch memory is allocated here, where the allocator makes shareable memory.
        """
        import torch

        self._family = family
        self._storages = storages
        self._runtime = family.runtime()
        self._index = storages[0].device.index
        self.device = f"{family.kind}:{family.identity(self._index).physical_id}"
        self._scratch = torch.empty(
            proof.PROOF_BYTES, dtype=torch.uint8, device=f"{family.kind}:{self._index}"
        )
        self._nonce = 0
        self._interprocess = self._can_share_events()

    def _can_share_events(self) -> bool:
        try:
            with self._runtime.device(self._index):
                self._runtime.Event(interprocess=True)
        except RuntimeError:
            return False
        return True

    def prepare(self) -> None:
        """Share every storage once and take it back: an unshareable one is found now."""
        import torch

        release = getattr(torch.UntypedStorage, f"_release_ipc_counter_{self._family.kind}")
        for handle in self.handles():
            # Nobody will import this handle: without this its counter would stay up for ever.
            release(handle.counter, handle.counter_slot)

    def bind_thread(self) -> None:
        """A thread without a device would take card 0, and memory on it."""
        self._runtime.set_device(self._index)

    def handles(self) -> tuple[DeviceHandle, ...]:
        """Fresh handles: each may be imported once."""
        pid = os.getpid()
        return tuple(export_storage(self._family, each, pid) for each in self._storages)

    def proof(self) -> MemoryProof:
        """Write a question into the scratch memory, and let an event say when it is there."""
        import torch

        self._nonce = int.from_bytes(os.urandom(7), "little")
        text = torch.frombuffer(bytearray(proof.question(self._nonce)), dtype=torch.uint8)
        with self._runtime.device(self._index):
            self._scratch.copy_(text)
            handle = export_storage(self._family, self._scratch.untyped_storage(), os.getpid())
            event = b""
            if self._interprocess:
                self._event = self._runtime.Event(interprocess=True)
                self._event.record()
                event = bytes(self._event.ipc_handle())
            else:
                self._runtime.current_stream().synchronize()
        return MemoryProof(storage=handle, nonce=self._nonce, event=event)

    def proven(self) -> bool:
        """Read the scratch memory."""
        with self._runtime.device(self._index):
            return bytes(self._scratch.cpu().numpy().tobytes()) == proof.answer(self._nonce)

    def clock(self, num_slots: int) -> DeviceClock | None:
        """Events, shared between processes where the device can."""
        return EventClock(self._runtime, self._index, num_slots, interprocess=self._interprocess)


def family_of(kind: str) -> Family | None:
    """The family of a kind of device; None for the CPU.

    Raises:
        HandleError: a kind that is not served.
    """
    if kind == "cpu":
        return None
    if kind == "npu":
        from kvcommon.memory.npu import FAMILY

        return FAMILY
    if kind == "cuda":
        from kvcommon.memory.cuda import FAMILY as CUDA

        return CUDA
    raise HandleError(f"KV caches on {kind!r} are not served", "devices are cpu, npu and cuda")


def make_exporter(storages: Sequence["torch.UntypedStorage"], *, inline: bool) -> Exporter:
    """Pick the exporter of these storages.

    Raises:
        HandleError: no storages, storages of several devices, or of one that is not served.
    """
    devices = {storage.device for storage in storages}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "none"
        cause = f"the KV cache must lie on one device; it lies on: {names}"
        raise HandleError(cause, "KV caches that are offloaded in part are not served")
    family = family_of(devices.pop().type)
    if inline:
        return LocalExporter(storages, family)
    return CpuExporter(storages) if family is None else DeviceExporter(family, storages)
