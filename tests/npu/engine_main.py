"""An engine without vLLM: the real model side, driven by a loop over layers on a device.

``python -m tests.npu.engine_main <fd> <device index>``: answers commands on a socket.
"""

import os
import socket
import sys
import time
import types
from typing import Any

import msgspec
import torch
import zmq

# Before kvsched: there is no vLLM here, and the metadata classes only need their bases.
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_bases = types.ModuleType(_BASE)
for _name in ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata"):
    setattr(_bases, _name, type(_name, (), {}))
sys.modules[_BASE] = _bases

from kvcommon.describe import GroupSpec, describe_cache  # noqa: E402
from kvcommon.ids import EngineId, new_epoch  # noqa: E402
from kvcommon.keys import Namespace, fingerprint  # noqa: E402
from kvcommon.memory.export import make_exporter  # noqa: E402
from kvcommon.memory.page import ProgressPage  # noqa: E402
from kvcommon.messages import Attach  # noqa: E402
from kvsched.attachment import Attachment  # noqa: E402
from kvsched.clocked import ClockedDataLink  # noqa: E402
from kvsched.core.commands import ModelLoad, TellModel  # noqa: E402
from kvsched.link import DaemonLink  # noqa: E402
from kvsched.metadata import step_metadata  # noqa: E402
from kvsched.model_side import ModelSide  # noqa: E402
from tests.conformance.devices.memory import receive, send  # noqa: E402
from tests.npu.caches import BLOCK_SIZE, CACHES, NUM_BLOCKS  # noqa: E402
from tests.npu.content import layer_bytes  # noqa: E402

PATIENCE_S = 30.0


class Engine:
    """One rank."""

    def __init__(self, index: int) -> None:
        import torch_npu

        self._runtime: Any = getattr(torch, "npu")  # noqa: B009 - torch_npu adds it
        self.version = torch_npu.__version__
        self._device = f"npu:{index}"
        self._runtime.set_device(index)
        self._keep: list[torch.Tensor] = []

    def start(self, endpoint: str, name: str, cache: str, rank: int, load_ms: float) -> Any:
        """Allocate, describe, export, attach. Returns (device, fingerprint, object bytes)."""
        caches = CACHES[cache](self._device)
        spec = GroupSpec(0, BLOCK_SIZE, NUM_BLOCKS, tuple(caches))
        layout, storages = describe_cache(caches, [spec])
        self._caches = caches
        self.group = layout.groups[0]
        self._raw = [
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(
                storage, 0, (storage.nbytes(),), (1,)
            )
            for storage in storages
        ]
        exporter = make_exporter(storages, inline=False)
        self._exporter = exporter
        page, epoch, engine = ProgressPage.create(), new_epoch(), EngineId(name)
        identity = Namespace(
            model=cache,
            revision="1",
            dtype="bfloat16",
            cache_dtype="auto",
            block_sizes=(BLOCK_SIZE,),
            layout=(cache,),
            layers=(0, len(caches)),
            tensor_parallel=1,
            pipeline_parallel=1,
            rank=(0, rank),
            hash_algorithm="sha256",
            hash_seed="0",
        )

        def export() -> Attach:
            exporter.bind_thread()
            return Attach(
                pid=os.getpid(),
                device=exporter.device,
                storages=exporter.handles(),
                layout=layout,
                page=page.handle,
                namespace=identity,
                proof=exporter.proof(),
            )

        exporter.prepare()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.attachment = Attachment(
            lambda: DaemonLink(context, endpoint, rank, "model"),
            engine,
            epoch,
            export=export,
            page=page,
            heartbeat_ms=200,
            proven=exporter.proven,
        )
        clock = exporter.clock(2 * len(caches) + 2)
        assert clock is not None
        link = DaemonLink(context, endpoint, rank, "data")
        self.model = ModelSide(
            self.attachment,
            page,
            ClockedDataLink(link, engine, epoch, clock, self.attachment),
            tuple(caches),
            load_ms,
        )
        return exporter.device, fingerprint(identity), self.group.object_bytes

    def layer_sizes(self) -> list[int]:
        """Bytes of one block in each layer of the table."""
        return [layer.block_bytes for layer in self.group.layers]

    def attached(self, generation: int) -> Any:
        """Wait for an attachment; returns what the daemon can do."""
        deadline = time.monotonic() + PATIENCE_S
        while not (self.attachment.attached and self.attachment.generation >= generation):
            assert time.monotonic() < deadline, "not attached"
            time.sleep(0.005)
        return self.attachment.capabilities

    def refusal(self) -> str:
        """Wait until the daemon refuses; returns why."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.attachment._refused:
            assert time.monotonic() < deadline, "not refused"
            time.sleep(0.005)
        return self.attachment._refused

    def save(self, step: int, seed: int, blocks: list[int]) -> None:
        """A step that computes blocks layer by layer; nothing is waited for."""
        self.model.bind(step_metadata(TellModel(step=step, saves=True)))
        for number, layer in enumerate(self.group.layers):
            for block in blocks:
                self._write(layer, block, layer_bytes(seed, block, number, layer.block_bytes))
            self.model.layer_computed(layer.name)
        self.model.step_computed()
        self.model.clear()

    def scribble(self, seed: int, blocks: list[int]) -> None:
        """An earlier step that still writes into blocks, some time later."""
        for number, layer in enumerate(self.group.layers):
            for block in blocks:
                self._write(layer, block, layer_bytes(seed, block, number, layer.block_bytes))

    def load(self, step: int, job: int, blocks: list[int]) -> Any:
        """A step with a layerwise load: every layer as attention would read it.

        Returns (per block, the bytes of its layers one after another), failed blocks.
        """
        load = ModelLoad(job_id=job, request_id="r", block_ids=tuple(blocks), layerwise=True)
        self.model.bind(step_metadata(TellModel(step=step, loads=(load,))))
        seen: dict[int, bytes] = dict.fromkeys(blocks, b"")
        for layer in self.group.layers:
            self.model.wait_for_layer(layer.name)
            for block in blocks:
                seen[block] += self._read(layer, block)
        failed = self.model.failed_blocks()
        self.model.clear()
        return [seen[block] for block in blocks], sorted(failed)

    def begin(self, step: int, job: int, blocks: list[int]) -> None:
        """A step with an asynchronous load begins."""
        load = ModelLoad(job_id=job, request_id="r", block_ids=tuple(blocks), layerwise=False)
        self.model.bind(step_metadata(TellModel(step=step, loads=(load,))))
        self.model.clear()

    def finished(self) -> Any:
        """Wait for it; returns failed blocks."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.model.finished_loads():
            assert time.monotonic() < deadline, "the load does not end"
            time.sleep(0.005)
        return sorted(self.model.failed_blocks())

    def blocks(self, blocks: list[int]) -> list[bytes]:
        """Bytes of blocks now."""
        return [
            b"".join(self._read(layer, block) for layer in self.group.layers) for block in blocks
        ]

    def leave(self) -> None:
        """Detach, and free the KV cache at once: the daemon must have let go of it."""
        self.model.close()
        self._runtime.synchronize()
        self._raw.clear()
        self._caches.clear()
        self._keep.clear()
        del self._exporter
        self._runtime.ipc_collect()
        self._runtime.empty_cache()

    def _write(self, layer: Any, block: int, data: bytes) -> None:
        self._keep = self._keep[-512:]
        at = 0
        for plane in layer.planes:
            for start, length in plane.segments:
                source = torch.frombuffer(bytearray(data[at : at + length]), dtype=torch.uint8)
                pinned = source.pin_memory()
                self._keep.append(pinned)
                place = plane.offset + block * plane.block_stride + start
                self._raw[plane.storage][place : place + length].copy_(pinned, non_blocking=True)
                at += length

    def _read(self, layer: Any, block: int) -> bytes:
        found = b""
        for plane in layer.planes:
            for start, length in plane.segments:
                place = plane.offset + block * plane.block_stride + start
                part = self._raw[plane.storage][place : place + length]
                found += part.cpu().numpy().tobytes()
        return found


def main(fd: int, index: int) -> None:
    """Answer until the other end closes."""
    link = socket.socket(fileno=fd)
    engine = Engine(index)
    while True:
        try:
            command, args = receive(link)
        except EOFError:
            return
        if command == "ready":
            send(link, engine.version)
            continue
        answer = getattr(engine, command)(*args)
        send(link, msgspec.to_builtins(answer, builtin_types=(bytes,)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
