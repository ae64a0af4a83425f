"""Share memory with another process, as an engine and its daemon do.

``python -m kvworker.doctor.probe npu:0`` is the engine's part.
"""

import subprocess
import sys
from typing import IO

import msgspec

from kvcommon.errors import DeviceError, HandleError
from kvcommon.memory.handles import MemoryProof
from kvworker.devices.torch_device import TorchDevice

#: Loading torch and a device's software takes a while; a driver that hangs takes for ever.
_PATIENCE_S = 120.0
_REFUSAL = b"cannot share: "


def share(device: TorchDevice) -> bool:
    """Let another process share memory of the card, read it and answer in it.

    Returns:
        True if events can be shared too.

    Raises:
        HandleError, DeviceError: it does not work; says why.
    """
    command = [sys.executable, "-m", __name__, f"{device.kind}:{device.index}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        try:
            events = device.prove(_proof(engine.stdout, engine))
            engine.stdin.write(b"\n")
            engine.stdin.close()
            if engine.wait(_PATIENCE_S) != 0:
                raise HandleError("the other process does not see what was written")
        finally:
            if engine.poll() is None:
                engine.kill()
    return events


def _proof(lines: IO[bytes], engine: "subprocess.Popen[bytes]") -> MemoryProof:
    """Read the proof; libraries may print other lines before it."""
    for line in lines:
        if line.startswith(b'{"'):
            return msgspec.json.decode(line, type=MemoryProof)
        if line.startswith(_REFUSAL):
            raise HandleError(line.removeprefix(_REFUSAL).decode().strip())
    raise DeviceError(f"the other process ended with status {engine.wait(_PATIENCE_S)}")


def main(device: str) -> int:
    """Share, wait for the answer, and say by the exit status whether it came."""
    import torch

    from kvcommon.memory.export import DeviceExporter, family_of

    kind, _, index = device.partition(":")
    family = family_of(kind)
    assert family is not None
    family.runtime().set_device(int(index))
    storage = torch.empty(4096, dtype=torch.uint8, device=device).untyped_storage()
    exporter = DeviceExporter(family, [storage])
    try:
        sys.stdout.write(msgspec.json.encode(exporter.proof()).decode() + "\n")
    except HandleError as error:
        sys.stdout.write(f"{_REFUSAL.decode()}{error}\n")
        return 1
    sys.stdout.flush()
    sys.stdin.readline()
    return 0 if exporter.proven() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
