"""A real daemon in a process of its own, for tests."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvcommon.messages import Status
from kvworker.ask import ask_status
from kvworker.descriptor import read_descriptor

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 30.0
_SHM = Path("/dev/shm")


def environment() -> dict[str, str]:
    """The environment in which the project's packages are found, installed or not."""
    paths = [str(_ROOT / "common"), str(_ROOT / "tools"), str(_ROOT)]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVFERRY", "MOONCAKE"))}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths)}


def command(*arguments: str) -> list[str]:
    """The command line of ``kvworker``."""
    return [sys.executable, "-m", "kvworker", *arguments]


class DaemonProcess:
    """A serving daemon."""

    def __init__(self, directory: Path, device: str, process: "subprocess.Popen[bytes]") -> None:
        self.directory = directory
        self.device = device
        self.process = process
        self.socket_path = directory / f"{device.replace(':', '-')}.sock"
        self.log_path = directory / "stderr.log"

    @property
    def endpoint(self) -> str:
        """Where it serves."""
        return f"ipc://{self.socket_path}"

    @property
    def descriptor_path(self) -> Path:
        """The file that says so."""
        return self.socket_path.with_suffix(".json")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def maps(self) -> str:
        """Its memory mappings."""
        return Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8")

    def has_mapped(self, inode: int) -> bool:
        """Whether it maps the memory file (memfd) of this inode."""
        fields = (line.split(maxsplit=5) for line in self.maps.splitlines() if "/memfd:" in line)
        return any(int(field[4]) == inode for field in fields)

    def shm_files(self) -> set[Path]:
        """The named shared memory that it has mapped (of others' tests there may be more)."""
        paths = (
            line.split(maxsplit=5)[5] for line in self.maps.splitlines() if "/dev/shm/" in line
        )
        return {Path(path) for path in paths}

    def status(self) -> Status:
        """Ask it how it is."""
        return ask_status(self.endpoint, _PATIENCE_S)

    def wait_ready(self) -> None:
        """Wait until it has written its descriptor."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            assert self.process.poll() is None, f"the daemon ended at start:\n{self.log}"
            found = read_descriptor(self.descriptor_path)
            if found is not None and found.pid == self.pid:
                return
            assert time.monotonic() < deadline, f"the daemon does not come up:\n{self.log}"
            time.sleep(0.01)

    def stop(self) -> int:
        """End it by SIGTERM and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_PATIENCE_S)


@contextlib.contextmanager
def daemon(
    *options: str,
    device: str = "cpu:0",
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Iterator[DaemonProcess]:
    """Run ``kvworker serve`` until the block ends, then see that it leaves nothing behind.

    Args:
        options: More options of ``serve``; the store is ``memory`` unless they name one.
        device: What it serves.
        directory: Its run directory; None: a new one.
        environ: More environment variables.
    """
    shm_before = set(_SHM.iterdir())
    with contextlib.ExitStack() as stack:
        if directory is None:
            # Short: a socket path has at most 107 bytes, and pytest's own are long.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf")))
        store: Sequence[str] = () if "--store" in options else ("--store", "memory")
        arguments = command(
            "serve", "--device", device, "--run-dir", str(directory), "--validate", *store, *options
        )
        with (directory / "stderr.log").open("wb") as log:
            process = subprocess.Popen(
                arguments, stderr=log, env={**environment(), **(environ or {})}
            )
        running = DaemonProcess(directory, device, process)
        try:
            running.wait_ready()
            yield running
            used = running.shm_files() if process.poll() is None else set()
            if process.poll() is None:
                assert running.stop() == 0, running.log
            assert not running.socket_path.exists()
            assert not running.descriptor_path.exists()
            left = {path for path in used - shm_before if path.exists()}
            assert not left
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(_PATIENCE_S)
