"""A run directory, daemons and engines that belong together."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from kvcommon.eventlog import read_log
from kvcommon.messages import LoadJob, SaveJob, StepPlan
from kvsched.core.commands import SchedCommand, SendToDaemon
from servers import DaemonProcess
from tests.e2e.engines import EngineProcess, assert_same

SEGMENT = "256MB"
_commands = msgspec.msgpack.Decoder(list[SchedCommand])


def mooncake_file(folder: Path, master: str, segment: str = SEGMENT) -> Path:
    path = folder / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master,
                "global_segment_size": segment,
                "local_buffer_size": "16MB",
                "protocol": "tcp",
                "local_hostname": "127.0.0.1",
            }
        )
    )
    return path


class Stack:
    """Daemons in one run directory; a context manager."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        mooncake: Path | None,
        devices: Sequence[str] = ("cpu:0",),
        save: str = "layerwise",
    ) -> None:
        self.folder = folder
        self.model = model
        self.mooncake = mooncake
        self.run_dir = folder / "run"
        self.logs = folder / "logs"
        self._exits = contextlib.ExitStack()
        self._devices = devices
        self._save = save
        self._count = 0
        self.daemons: dict[str, DaemonProcess] = {}

    def __enter__(self) -> "Stack":  # noqa: PYI034 (Self needs Python 3.11)
        with contextlib.ExitStack() as exits:
            for device in self._devices:
                self.daemons[device] = exits.enter_context(self.daemon(device))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    def daemon(self, device: str, arguments: Sequence[str] = ()) -> DaemonProcess:
        store = ["--store", "memory"]
        if self.mooncake is not None:
            store = ["--store", "mooncake", "--mooncake-config", str(self.mooncake)]
        return DaemonProcess(
            self.run_dir,
            self.folder / f"daemon-{device.replace(':', '-')}.log",
            device=device,
            arguments=[
                *store,
                "--event-log",
                str(self.logs),
                "--validate",
                "--save",
                self._save,
                *arguments,
            ],
        )

    def connector(
        self, role: str = "kv_both", policy: str = "recompute", **options: Any
    ) -> dict[str, Any]:
        return {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvsched.connector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                "run_dir": str(self.run_dir),
                # "auto" may find that this machine, just now, computes faster than it loads.
                "load": "layerwise",
                # Slow machines: a lookup that comes late would be a miss, and that is tested alone.
                "lookup_timeout_ms": 20_000,
                "load_timeout_ms": 60_000,
                "validate": True,
                **options,
            },
        }

    def engine(
        self,
        connector: dict[str, Any] | None = None,
        *,
        in_process: bool = True,
        environ: dict[str, str] | None = None,
        model: Path | None = None,
        **options: Any,
    ) -> EngineProcess:
        self._count += 1
        return EngineProcess(
            model or self.model,
            self.folder / f"engine-{self._count}.log",
            connector=connector or self.connector(),
            in_process=in_process,
            environ=environ,
            **options,
        )

    def plans(self) -> tuple[list[SaveJob], list[LoadJob]]:
        """All jobs that scheduler sides of this stack have published to rank 0, in order."""
        saves: list[SaveJob] = []
        loads: list[LoadJob] = []
        # By time: engines have random names.
        logs = [read_log(path) for path in self.logs.glob("kvsched-*.kvlog")]
        for log in sorted(logs, key=lambda log: log.header.mono_ns):
            for record in log:
                for command in _commands.decode(record.commands):
                    if not isinstance(command, SendToDaemon) or command.rank != 0:
                        continue
                    if isinstance(command.body, StepPlan):
                        saves.extend(command.body.saves)
                        loads.extend(command.body.loads)
        return saves, loads


def block_digests(engine: EngineProcess, jobs: Sequence[SaveJob | LoadJob]) -> dict[bytes, Any]:
    """Digest of each job's blocks on every rank, by block hash."""
    ids = [block for job in jobs for block in job.block_ids]
    hashes = [name for job in jobs for name in job.block_hashes]
    per_rank = engine.call("digests", block_ids=ids)
    return {name: [rank[i] for rank in per_rank] for i, name in enumerate(hashes)}


def prompt(seed: int, length: int) -> list[int]:
    """A random-looking prompt of plain words; different seeds share no block."""
    state = seed * 7919 + 17
    tokens = []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % (1 << 31)
        tokens.append(6 + (state >> 8) % 500)
    return tokens


def cold(reference: EngineProcess, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
    """What a run without any cache answers."""
    assert reference.call("reset")
    return reference.generate(prompts, **options)


__all__ = ["Stack", "assert_same", "block_digests", "cold", "mooncake_file", "prompt"]
