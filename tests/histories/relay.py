"""A socket in front of a daemon's: whoever connects meets this process, not the daemon's."""

import contextlib
import socket
import threading
from pathlib import Path
from types import TracebackType


class Relay:
    """Hands bytes on in both directions; a context manager."""

    def __init__(self, path: Path, target: str) -> None:
        """Listen at ``path`` for what ``target`` is to hear."""
        self.endpoint = f"ipc://{path}"
        self._target = target
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()

    def __enter__(self) -> "Relay":  # noqa: PYI034 (Self needs Python 3.11)
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._target)
                self._sockets += [near, far]
                self._start(self._hand_on, near, far)
                self._start(self._hand_on, far, near)

    @staticmethod
    def _hand_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
