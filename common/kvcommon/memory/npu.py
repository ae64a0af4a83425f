"""Ascend NPU memory, shared with torch_npu. See ``torch_ipc`` for the rules.

torch_npu is loaded by the functions that need it, never at import.
"""

import ctypes
import os
from typing import Any

from kvcommon.errors import HandleError
from kvcommon.memory.handles import NpuHandle
from kvcommon.memory.torch_ipc import Family, Identity

#: A key: version, type, and 65 bytes of CANN's. Type ``e`` is an expandable segment.
KEY_BYTES = 67
_VERSION, _PLAIN, _EXPANDABLE = 1, b"c", b"e"
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
#: What torch_npu's allocator reads when it is loaded.
ALLOC_CONF = "PYTORCH_NPU_ALLOC_CONF"
_EXPANDABLE_REMEDY = (
    f"start the engine with {ALLOC_CONF}=expandable_segments:False (vllm-ascend switches them on "
    "unless that variable names them)"
)


def runtime() -> Any:  # noqa: ANN401 - torch.npu has no types
    """Load torch_npu; returns ``torch.npu``.

    Raises:
        HandleError: it is not installed, or CANN is not there.
    """
    try:
        import torch
        import torch_npu
    except ImportError as error:
        cause = f"torch_npu cannot be loaded: {error}"
        remedy = (
            "pip install 'kvferry[npu]', and source CANN's set_env.sh (kvworker doctor says more)"
        )
        raise HandleError(cause, remedy) from error
    del torch_npu
    return getattr(torch, "npu")  # noqa: B009 - torch_npu adds it


def identity(index: int) -> Identity:
    """Which card a device index of this process means."""
    return Identity(physical_id(index), _uuid(index))


def physical_id(index: int) -> int:
    """Physical id of a device, as the runtime says, else from the list of visible devices."""
    try:
        found = ctypes.c_int32(-1)
        ask = ctypes.CDLL("libascendcl.so").aclrtGetPhyDevIdByLogicDevId
        if ask(ctypes.c_int32(index), ctypes.byref(found)) == 0:
            return found.value
    except (OSError, AttributeError):
        pass
    visible = os.environ.get(_VISIBLE, "").replace(" ", "").split(",")
    if index < len(visible) and visible[index].isdigit():
        return int(visible[index])
    return index


def _uuid(index: int) -> bytes:
    """Uuid of a device; empty if the driver gives none (all zero, on every card alike)."""
    told = getattr(runtime().get_device_properties(index), "uuid", "")
    text = told.hex() if isinstance(told, bytes) else str(told).replace("-", "")
    try:
        uuid = bytes.fromhex(text)
    except ValueError:
        uuid = text.encode()
    return uuid if any(uuid) else b""


def check_key(key: bytes) -> None:
    """Refuse a key that is not of plain device memory.

    Raises:
        HandleError: an expandable segment, or nothing that this version knows.
    """
    if key[1:2] == _EXPANDABLE:
        cause = "the KV cache lies in expandable segments, which cannot be shared safely"
        raise HandleError(cause, _EXPANDABLE_REMEDY)
    if len(key) != KEY_BYTES or key[0] != _VERSION or key[1:2] != _PLAIN:
        cause = f"a key of {len(key)} bytes, beginning {key[:2].hex()}, is not one that is known"
        raise HandleError(cause, "use the same torch_npu on both sides; 7.2.0 or later")


FAMILY = Family(
    kind="npu",
    runtime=runtime,
    identity=identity,
    handle=NpuHandle,
    check_key=check_key,
    share="_share_npu_",
    new_shared="_new_shared_npu",
    remedy=(
        "the KV cache must be plain memory of torch_npu's own allocator in the base format: no "
        "sleep mode, no pluggable allocator, no FRACTAL_NZ storage; torch_npu 7.2.0, CANN 8.3.RC1 "
        "and driver 25.3.RC1 or later. Or use mode: inline"
    ),
)
