"""The variants that are compared, and engines in child processes to run them in.

Each variant with a store has a Mooncake master of its own, so that the objects of one can never
lie in the segment of another.
"""

import contextlib
import dataclasses
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import servers
import tinymodel
from localmaster import LocalMaster

if TYPE_CHECKING:
    from typing_extensions import Self

#: Longest time until an engine has answered an order.
ORDER_S = 240.0
#: Two prompts of 46 MiB per repeat would fit dozens of times.
SEGMENT_BYTES = 2 << 30
LOCAL_BUFFER_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What all engines of a benchmark have in common."""

    model: Path
    max_model_len: int = 4096
    #: The whole prompt in one step, so that chunking plays no part.
    max_batched_tokens: int = 4096
    max_num_seqs: int = 256
    multi: bool = True
    #: kvferry's event logs go to a folder per variant below this one; empty: none are kept.
    event_logs: str = ""


class Engine(servers.ServerProcess):
    """An engine in a child process that is given orders over a pipe.

    Args:
        config: What all engines have in common.
        kv_transfer: vLLM's connector configuration, or None.
        log: File for all it prints.
        environ: More environment.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        kv_transfer: dict[str, object] | None,
        log: Path,
        environ: dict[str, str],
    ) -> None:
        self._orders_read, orders = os.pipe()
        answers, self._answers_write = os.pipe()
        script = Path(__file__).with_name("engine_child.py")
        command = [sys.executable, str(script), str(self._orders_read), str(self._answers_write)]
        super().__init__(name, command, log, servers.engine_environ(environ))
        self._orders = os.fdopen(orders, "w")
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._config = config
        self._kv_transfer = kv_transfer
        self._rest = b""

    def __enter__(self) -> "Self":
        """Start the engine and wait until it takes orders."""
        self.launch(pass_fds=(self._orders_read, self._answers_write))
        os.close(self._orders_read)
        os.close(self._answers_write)
        config = dataclasses.asdict(self._config)
        config |= {"model": str(self._config.model), "kv_transfer": self._kv_transfer}
        vocabulary = json.loads((self._config.model / "config.json").read_text())["vocab_size"]
        self._send(config | {"vocabulary": vocabulary})
        self._receive(servers.ENGINE_START_S)
        return self

    def order(self, op: str, **arguments: object) -> dict[str, Any]:
        """Have the engine do something and return its answer.

        Raises:
            ServerError: it ended, is too late, or says that it went wrong.
        """
        self._send({"op": op, **arguments})
        answer = self._receive(ORDER_S)
        if "error" in answer:
            raise servers.ServerError(f"{self.name}: {op}: {answer['error']}")
        return answer

    def _send(self, content: dict[str, object]) -> None:
        try:
            self._orders.write(json.dumps(content) + "\n")
            self._orders.flush()
        except BrokenPipeError:
            self.check_alive()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], 0.5)
            if ready:
                self._rest += os.read(self._answers.fileno(), 1 << 20)
            self.check_alive()
            if time.monotonic() > deadline:
                tail = servers.log_tail(self.log)
                raise servers.ServerError(
                    f"{self.name} has not answered for {timeout_s:.0f} s; its log ends:\n{tail}"
                )
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End it, and close the pipes."""
        super().stop()
        for end in (self._orders, self._answers):
            with contextlib.suppress(OSError):
                end.close()


@dataclasses.dataclass(frozen=True)
class Setup:
    """What an engine of a variant is started with."""

    kv_transfer: dict[str, object] | None
    environ: dict[str, str]


@contextlib.contextmanager
def no_connector(_folder: Path, _event_log: str) -> Iterator[Setup]:
    """Run vLLM alone."""
    yield Setup(None, {})


@contextlib.contextmanager
def in_tree(folder: Path, _event_log: str) -> Iterator[Setup]:
    """Use vLLM's MooncakeStoreConnector as it comes; the segment lies in the vLLM worker."""
    with LocalMaster() as master:
        path = _mooncake_config(folder, master.address, mode="embedded")
        config = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
        yield Setup(dict(config), {"MOONCAKE_CONFIG_PATH": str(path)})


@contextlib.contextmanager
def kvferry_inline(folder: Path, event_log: str) -> Iterator[Setup]:
    """Run the daemon in a thread of the vLLM worker; the segment lies there too."""
    with LocalMaster() as master:
        path = _mooncake_config(folder, master.address)
        extra: dict[str, object] = {
            "mode": "inline",
            "store": "mooncake",
            "mooncake_config": str(path),
            "event_log": event_log,
        }
        yield Setup(_kvferry(folder, extra), {})


@contextlib.contextmanager
def kvferry_daemon(folder: Path, event_log: str) -> Iterator[Setup]:
    """Run the daemon in a process of its own, where the segment lies."""
    with LocalMaster() as master:
        path = _mooncake_config(folder, master.address)
        run_dir = folder / "run"
        run_dir.mkdir(mode=0o700, exist_ok=True)
        arguments = ["--store", "mooncake", "--mooncake-config", str(path)]
        arguments += ["--event-log", event_log] if event_log else []
        with servers.DaemonProcess(run_dir, folder / "daemon.log", arguments=arguments):
            yield Setup(_kvferry(folder, {"daemons": "auto", "run_dir": str(run_dir)}), {})


#: In the order in which they are run and shown.
VARIANTS: dict[str, Callable[[Path, str], contextlib.AbstractContextManager[Setup]]] = {
    "none": no_connector,
    "in-tree": in_tree,
    "kvferry inline": kvferry_inline,
    "kvferry daemon": kvferry_daemon,
}


@contextlib.contextmanager
def running(names: list[str], config: EngineConfig, logs: Path) -> Iterator[dict[str, Engine]]:
    """Start one engine per variant, one after another, and keep them until the block ends.

    Their logs go to ``logs``; all else lies in a temporary folder with a short path, for sockets.
    """
    tinymodel.make_model(config.model)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-")))
        engines = {}
        for name in names:
            place = folder / name.replace(" ", "-")
            place.mkdir(parents=True, exist_ok=True)
            event_log = str(Path(config.event_logs) / place.name) if config.event_logs else ""
            setup = stack.enter_context(VARIANTS[name](place, event_log))
            log = logs / f"{place.name}.log"
            log.unlink(missing_ok=True)
            engine = Engine(name, config, setup.kv_transfer, log, setup.environ)
            engines[name] = stack.enter_context(engine)
        yield engines


def _kvferry(folder: Path, extra: dict[str, object]) -> dict[str, object]:
    # Long bounds: on a busy machine a late answer is to be seen as time, not as a miss.
    bounds = {"lookup_timeout_ms": 5000, "load_timeout_ms": 20000}
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvsched.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"label": folder.name, **bounds, **extra},
    }


def _mooncake_config(folder: Path, master: str, **more: object) -> Path:
    path = folder / "mooncake.json"
    content = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "global_segment_size": SEGMENT_BYTES,
        "local_buffer_size": LOCAL_BUFFER_BYTES,
        "protocol": "tcp",
        "device_name": "",
        **more,
    }
    path.write_text(json.dumps(content), "utf-8")
    return path
