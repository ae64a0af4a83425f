"""CUDA memory, shared with torch. See ``torch_ipc`` for the rules."""

import os
from typing import Any

from kvcommon.errors import HandleError
from kvcommon.memory.handles import CudaHandle
from kvcommon.memory.torch_ipc import Family, Identity

_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: What torch's allocator reads when it is loaded.
ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"
_VERSION, _PLAIN = 1, b"c"
#: A bare key of cudaIpcGetMemHandle, and one with torch's version and type before it.
_KEY_BYTES = (64, 66)


def runtime() -> Any:  # noqa: ANN401 - as little of torch as of torch_npu is typed here
    """Load torch; returns ``torch.cuda``.

    Raises:
        HandleError: torch is missing, or was built without CUDA.
    """
    try:
        import torch
    except ImportError as error:
        raise HandleError("torch is not installed", "pip install 'kvferry[cuda]'") from error
    if not torch.cuda.is_available():
        cause = "torch sees no CUDA device"
        raise HandleError(cause, "install a CUDA build of torch (pip install 'kvferry[cuda]')")
    return torch.cuda


def identity(index: int) -> Identity:
    """Which card a device index of this process means."""
    visible = os.environ.get(_VISIBLE, "").replace(" ", "").split(",")
    named = index < len(visible) and visible[index].isdigit()
    uuid = str(getattr(runtime().get_device_properties(index), "uuid", ""))
    return Identity(int(visible[index]) if named else index, uuid.encode())


def check_key(key: bytes) -> None:
    """Refuse a key that is not of plain device memory.

    Raises:
        HandleError: an expandable segment, or nothing that this version knows.
    """
    tagged = len(key) != _KEY_BYTES[0]
    if len(key) not in _KEY_BYTES or (tagged and (key[0] != _VERSION or key[1:2] != _PLAIN)):
        cause = "the KV cache lies in expandable segments, or the key is not one that is known"
        raise HandleError(cause, f"start the engine with {ALLOC_CONF}=expandable_segments:False")


FAMILY = Family(
    kind="cuda",
    runtime=runtime,
    identity=identity,
    handle=CudaHandle,
    check_key=check_key,
    share="_share_cuda_",
    new_shared="_new_shared_cuda",
    remedy=(
        "the KV cache must be plain memory of torch's own allocator: no sleep mode, no expandable "
        "segments, no pluggable allocator. Or use mode: inline"
    ),
)
