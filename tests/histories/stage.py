"""What a scene of a real run plays on: a stack whose processes can be hit at a chosen moment.

A moment is chosen by what a daemon says of itself (``Stage.until``), never by the clock.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil

from kvworker.ask import ask_status
from localmaster import LocalMaster
from servers import DaemonProcess
from tests.e2e.engines import EngineError, EngineProcess
from tests.e2e.stack import Stack, mooncake_file

PATIENCE_S = 60.0
#: So long that it never ends by itself before what is waited for has happened.
EVER_S = 600.0
CHILD = Path(__file__).with_name("stepped.py")
Rule = dict[str, Any]
#: The memory store copies from its own memory; without that, it reads as from another node.
REMOTE: Rule = {"call": "local", "what": "fail"}


def slow(call: str, seconds: float = EVER_S, **more: Any) -> Rule:
    """A call that is late; by default, later than anybody waits."""
    return {"call": call, "what": "delay", "seconds": seconds, **more}


def failing(call: str, outcome: str, times: int = 1, **more: Any) -> Rule:
    """A call that goes wrong."""
    return {"call": call, "what": "fail", "outcome": outcome, "times": times, **more}


class Setting(NamedTuple):
    """What a scene needs."""

    with_mooncake: bool = False
    devices: tuple[str, ...] = ("cpu:0",)
    #: Faults of the store in the first daemon of each device; later ones have none.
    store: tuple[Rule, ...] = ()
    #: Such faults of one device's daemon alone.
    only_on: str = ""
    #: More arguments of every daemon.
    arguments: tuple[str, ...] = ()
    #: Daemons are started by the scene.
    no_daemons: bool = False


class Stage(Stack):
    """A stack with a master of its own choice; a context manager."""

    def __init__(self, folder: Path, model: Path, setting: Setting) -> None:
        self._exit_all = contextlib.ExitStack()
        self.master = LocalMaster()
        self._setting = setting
        self._folder = folder
        super().__init__(folder, model, None, () if setting.no_daemons else setting.devices)

    def __enter__(self) -> "Stage":  # noqa: PYI034 (Self needs Python 3.11)
        with contextlib.ExitStack() as exits:
            if self._setting.with_mooncake:
                exits.enter_context(self.master)
                self.mooncake = mooncake_file(self._folder, self.master.address)
            super().__enter__()
            exits.callback(super().__exit__, None, None, None)
            self._exit_all = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit_all.close()

    def daemon(self, device: str, arguments: Sequence[str] = ()) -> DaemonProcess:
        setting = self._setting
        faulty = device not in self.daemons and setting.only_on in {"", device}
        if setting.store and faulty:
            plan = self.folder / f"plan-{device.replace(':', '-')}.json"
            plan.write_text(json.dumps({"store": setting.store}), "utf-8")
            arguments = (*arguments, "--inject", str(plan))
        return super().daemon(device, (*arguments, *setting.arguments))

    def another_daemon(self, device: str = "cpu:0") -> None:
        """Start the successor of a daemon that is gone, without faults."""
        old = self.daemons.get(device)
        if old is not None:
            old.kill()
        self.daemons[device] = self._exit_all.enter_context(self.daemon(device))

    # -- moments -------------------------------------------------------------------------------

    def metric(self, name: str, device: str = "cpu:0") -> float:
        """One number of a daemon's status."""
        endpoint = f"ipc://{self.daemons[device].socket_path}"
        return ask_status(endpoint, PATIENCE_S).metrics.get(f"kvferry_{name}", 0)

    def until(self, name: str, at_least: float = 1, device: str = "cpu:0") -> None:
        """Wait until a number of a daemon's status has grown so far."""
        wait_for(lambda: self.metric(name, device) >= at_least, f"{name} of {device}")

    def until_none(self, name: str, device: str = "cpu:0") -> None:
        """Wait until a number of a daemon's status is 0."""
        wait_for(lambda: not self.metric(name, device), f"no {name} of {device}")

    def until_logged(self, kind: str, num_logs: int = 1) -> None:
        """Wait until daemons' logs hold such a command: what a killed process had not yet written
        is lost.
        """

        def is_there() -> bool:
            logs = [path.read_bytes() for path in self.logs.glob("kvworker-*.kvlog")]
            return sum(kind.encode() in log for log in logs) >= num_logs

        wait_for(is_there, f"{kind} in {num_logs} logs")

    def freeze(self, device: str = "cpu:0") -> None:
        """Stop a daemon without ending it; return when it stands."""
        freeze(self.daemons[device].pid)

    def thaw(self, device: str = "cpu:0") -> None:
        """Let it go on."""
        os.kill(self.daemons[device].pid, signal.SIGCONT)

    def stepped(
        self, connector: dict[str, Any] | None = None, **options: Any
    ) -> "SteppedEngine":
        """An engine that is stepped by hand."""
        self._count += 1
        return SteppedEngine(
            self.model,
            self.folder / f"engine-{self._count}.log",
            connector=connector or self.connector(),
            **options,
        )


class SteppedEngine(EngineProcess):
    """An engine with the calls of ``stepped.py``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._command[1] = str(CHILD)


def wait_for(done: Callable[[], bool], what: str, every_s: float = 0.01) -> None:
    """Ask until it is so.

    Raises:
        TimeoutError: it does not become so.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for: {what}")
        time.sleep(every_s)


def freeze(pid: int) -> None:
    """Stop a process (not our child, perhaps); return when it stands."""
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, f"process {pid} stands")


@contextlib.contextmanager
def meanwhile(engine: EngineProcess, prompts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Serve prompts while the block runs; behind it they are served, or the engine is dead."""

    def serve() -> None:
        with contextlib.suppress(EngineError):
            engine.generate(prompts)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    except BaseException:
        engine.kill()
        raise
    finally:
        thread.join()


class _DoomedError(Exception):
    """The planned end of an engine."""


@contextlib.contextmanager
def doomed(engine: EngineProcess) -> Iterator[EngineProcess]:
    """An engine that is killed at the end of the block, whatever it is doing then."""
    with contextlib.suppress(_DoomedError), engine:
        yield engine
        engine.note_shm()
        engine.kill()
        raise _DoomedError
    for path in engine.leftovers():
        Path(path).unlink()


def workers(engine: EngineProcess) -> list[psutil.Process]:
    """The model workers of an engine of several ranks, by rank."""
    found = []
    for one in engine.members():
        with contextlib.suppress(psutil.Error):
            name = " ".join(one.cmdline())
            if "VLLM::Worker" in name:
                found.append((name, one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


__all__ = ["Setting", "Stage", "doomed", "failing", "meanwhile", "slow", "wait_for", "workers"]
