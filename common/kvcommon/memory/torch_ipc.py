"""Sharing device memory between processes with torch: what NPU and CUDA have in common.

The exporting half runs in the model process, the importing half in the daemon. Rules of torch's
reference counts, which both must keep: every handle is imported once; imports and closes of a
process are serialised; the exporter keeps its storages until the importer has let go; the importer
lets go in this order: wait for its own streams, drop views, drop storages, ``empty_cache``,
``ipc_collect``.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcommon.errors import HandleError
from kvcommon.memory.handles import CudaHandle, DeviceHandle, NpuHandle, StorageHandle

if TYPE_CHECKING:
    import torch

#: Bytes of an event's handle.
EVENT_BYTES = 64
_COUNTER = re.compile(rb"/torch_\d+_\d+_\d+")
SHM = Path("/dev/shm")  # noqa: S108 (torch's files, which have such names)
#: Nobody shares more in one storage (1 TiB).
_MAX_BYTES = 1 << 40
#: One import or release at a time: torch's table of opened handles races otherwise.
_lock = threading.Lock()


class Identity(NamedTuple):
    """Which card a device index means."""

    physical_id: int
    #: Empty: the driver does not know.
    uuid: bytes


class Family(NamedTuple):
    """What tells one kind of device from another."""

    #: ``npu`` or ``cuda``.
    kind: str
    #: Loads torch with the device's part and returns ``torch.npu`` or ``torch.cuda``.
    runtime: Callable[[], Any]
    identity: Callable[[int], Identity]
    handle: type[NpuHandle] | type[CudaHandle]
    #: Refuses the key of an allocation that cannot be shared.
    check_key: Callable[[bytes], None]
    #: Method of a storage, and static method of ``torch.UntypedStorage``.
    share: str
    new_shared: str
    #: What to do if sharing fails.
    remedy: str


def export_storage(family: Family, storage: "torch.UntypedStorage", pid: int) -> DeviceHandle:
    """Share one device storage, for one import.

    The caller keeps the storage alive until the importer has let go.

    Raises:
        HandleError: it cannot be shared, with what to change.
    """
    runtime = family.runtime()
    index = storage.device.index
    try:
        # Not the thread's device: that of the storage.
        with runtime.device(index):
            shared = getattr(storage, family.share)()
    except RuntimeError as error:
        raise HandleError(_first_line(error), family.remedy) from error
    _, key, size, offset, counter, counter_slot, event, event_required = shared
    if key is None or size < 1:
        raise HandleError("an empty storage cannot be shared", "leave the layer out")
    family.check_key(bytes(key))
    card = family.identity(index)
    return family.handle(
        physical_id=card.physical_id,
        uuid=card.uuid,
        pid=pid,
        size=size,
        handle=bytes(key),
        offset=offset,
        counter=bytes(counter),
        counter_slot=counter_slot,
        event=bytes(event),
        event_required=bool(event_required),
    )


def check_handle(family: Family, handle: StorageHandle, card: Identity) -> DeviceHandle:
    """Make sure that a handle is well formed and means memory of this card.

    It came from another process and goes into a driver, and into the name of a file.

    Raises:
        HandleError: it is not.
    """
    if not isinstance(handle, (NpuHandle, CudaHandle)) or not isinstance(handle, family.handle):
        cause = f"a handle of {type(handle).__name__} on a daemon for {family.kind}"
        raise HandleError(cause, f"start the daemon with the engine's device, not {family.kind}")
    family.check_key(handle.handle)
    if not 0 < handle.size <= _MAX_BYTES or handle.offset < 0 or handle.counter_slot < 0:
        raise HandleError(f"a handle of {handle.size} bytes at {handle.offset} makes no sense")
    if not _COUNTER.fullmatch(handle.counter):
        raise HandleError(f"{handle.counter[:60]!r} is no name of torch's reference counters")
    if len(handle.event) != EVENT_BYTES:
        raise HandleError(f"an event's handle has {EVENT_BYTES} bytes, not {len(handle.event)}")
    both_known = bool(handle.uuid and card.uuid)
    if handle.physical_id != card.physical_id or (both_known and handle.uuid != card.uuid):
        cause = (
            f"the engine's memory is on card {_show(handle)}, this daemon serves card {_show(card)}"
        )
        raise HandleError(cause, "start a daemon for the engine's card; cards count physically")
    return handle


def _show(card: DeviceHandle | Identity) -> str:
    return f"{card.physical_id} ({card.uuid.hex() or 'no uuid'})"


def import_storages(
    family: Family, index: int, handles: Sequence[DeviceHandle]
) -> "list[torch.UntypedStorage]":
    """Map checked handles. What was mapped before one that fails is released.

    The device and a stream of the caller are current: it is that stream which waits for the event
    that comes with a handle.

    Raises:
        HandleError: one cannot be mapped.
    """
    import torch

    new_shared = getattr(torch.UntypedStorage, family.new_shared)
    storages: list[torch.UntypedStorage] = []
    try:
        for handle in handles:
            with _lock:
                storages.append(
                    new_shared(
                        index,
                        handle.handle,
                        handle.size,
                        handle.offset,
                        handle.counter,
                        handle.counter_slot,
                        handle.event,
                        handle.event_required,
                    )
                )
    except RuntimeError as error:
        release_storages(family, storages)
        remedy = (
            "both processes need the same /dev/shm and IPC namespace (docker: --ipc=host), the "
            "same user and the same card; the engine must be alive"
        )
        raise HandleError(f"cannot map device memory: {_first_line(error)}", remedy) from error
    return storages


def release_storages(family: Family, storages: "list[torch.UntypedStorage]") -> None:
    """Let go of imported storages. The caller's streams are done with them; empties the list."""
    runtime = family.runtime()
    with _lock:
        runtime.synchronize()
        # No loop: its variable would keep the last one alive.
        storages.clear()
        runtime.empty_cache()
        runtime.ipc_collect()


def remove_dead_counters(handles: Iterable[StorageHandle]) -> None:
    """Remove the reference counters of exporters that are dead. Called after the release.

    torch keeps them in a file in /dev/shm (80 kB) that an exporter removes at its end, but not one
    that is killed.
    """
    for handle in handles:
        if not isinstance(handle, (NpuHandle, CudaHandle)):
            continue
        name = handle.counter.decode("ascii", errors="replace")
        # The name says whose it is: nobody has the counters of others removed.
        if name.startswith(f"/torch_{handle.pid}_") and _is_dead(handle.pid):
            with contextlib.suppress(OSError):
                (SHM / name[1:]).unlink(missing_ok=True)


def _is_dead(pid: int) -> bool:
    """No such process here, or one that has ended and that nobody has waited for yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state in {"Z", "X"} and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, IndexError):
        return False


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
