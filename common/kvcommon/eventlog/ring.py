"""The event log as a ring: the last seconds in memory, written when something has gone wrong.

Records are kept as they are (events and commands never change), so keeping one costs an append.
They are written, and forgotten, when a core fails, when a record is alarming, or when somebody
asks: by a call, or by touching the file ``dump`` in the log's directory, which every ring of that
directory looks at as time passes. What is written is an ordinary log whose parts are the dumps;
one that no longer has its beginning can be read, but not replayed.

One ring belongs to one thread. It writes there only what cannot wait: a core's fault. Everything
else is handed over to a thread of low priority, one dump at a time: what is wanted meanwhile waits
in the ring. A file that is being written is locked (``flock``).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from kvcommon.errors import ConfigError
from kvcommon.eventlog.compress import in_background
from kvcommon.eventlog.format import LogHeader
from kvcommon.eventlog.writer import LogWriter

#: File in the log's directory; whoever touches it wants every ring of the directory written.
REQUEST_FILE: Final = "dump"
#: Records kept at most, whatever the seconds.
MAX_RECORDS: Final = 200_000
_LOOK_NS: Final = 200_000_000
#: So many records are written at a time (about 1 ms), and then others may run.
_BATCH: Final = 128
_PAUSE_S: Final = 0.0005

Record = tuple[int, str, msgspec.Struct, Sequence[msgspec.Struct], str]
#: Says why a record is a reason to write; empty: it is none.
Alarm = Callable[[msgspec.Struct, Sequence[msgspec.Struct]], str]


class RingWriter:
    """Keeps records, and writes them when there is a reason."""

    def __init__(
        self,
        directory: Path,
        header: LogHeader,
        *,
        seconds: float,
        alarm: Alarm | None = None,
        redacted: bool = False,
        max_records: int = MAX_RECORDS,
        max_files: int = 8,
    ) -> None:
        """Create the directory (mode 0700) if needed; no file yet.

        Args:
            directory: where dumps go, and where the request to dump is looked for.
            header: of the log; ``part`` is counted here.
            seconds: how much is kept.
            alarm: says of each record whether it is a reason to write.
            redacted: hash request ids in what is written.
            max_records: keep at most so many.
            max_files: only the newest so many dumps stay.

        Raises:
            ConfigError: the directory cannot be made.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"event log {directory}: {error.strerror or error}; "
                "choose a directory that this process may write"
            ) from error
        self._directory = directory
        self._header = header
        self._keep_ns = int(seconds * 1e9)
        self._alarm = alarm
        self._redacted = redacted
        self._records: deque[Record] = deque(maxlen=max_records)
        self._max_files = max_files
        self._next_look_ns = 0
        self._asked_at = self._request_time()
        self._thread: threading.Thread | None = None
        #: Why a dump is wanted that waits for the one before it.
        self._wanted = ""
        #: Dumps written.
        self.num_dumps = 0
        #: Why the newest dump was written, or could not be.
        self.reason = ""
        #: Records that no dump took because it could not be written.
        self.num_dropped = 0

    def record(
        self,
        seq: int,
        cause: str,
        event: msgspec.Struct,
        commands: Sequence[msgspec.Struct],
        fault: str = "",
    ) -> None:
        """Keep one record; have everything written if it is alarming, and write it if it failed."""
        self._records.append((seq, cause, event, commands, fault))
        oldest = getattr(event, "now_ns", 0) - self._keep_ns
        while getattr(self._records[0][2], "now_ns", 0) < oldest:
            self._records.popleft()
        if fault:
            self.dump(fault)
            return
        why = self._alarm(event, commands) if self._alarm is not None else ""
        if why or self._wanted:
            self.dump_later(why)

    def flush(self) -> None:
        """Look (a few times a second) whether somebody wants a dump."""
        if self._wanted:
            self.dump_later("")
        now_ns = time.monotonic_ns()
        if now_ns < self._next_look_ns:
            return
        self._next_look_ns = now_ns + _LOOK_NS
        asked_at = self._request_time()
        if asked_at != self._asked_at:
            self._asked_at = asked_at
            self.dump_later("asked for")

    def dump(self, reason: str) -> Path | None:
        """Write what is kept, and forget it. Returns when everything is written.

        Returns:
            The file; None if nothing was kept or it cannot be written.
        """
        self.wait()
        self._wanted = ""
        return self._write(self._take(), reason, pause_s=0.0)

    def dump_later(self, reason: str) -> None:
        """Have what is kept written, and forget it; behind a dump that is being written.

        Args:
            reason: why; empty: for the reason that is waiting.
        """
        self._wanted = self._wanted or reason
        if self._thread is not None and self._thread.is_alive():
            return
        records, reason, self._wanted = self._take(), self._wanted, ""
        if records:
            write = partial(self._write, records, reason, pause_s=_PAUSE_S)
            self._thread = in_background("kvlog-ring", write)

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _take(self) -> "deque[Record]":
        records, self._records = self._records, deque(maxlen=self._records.maxlen)
        return records

    def _write(self, records: "deque[Record]", reason: str, *, pause_s: float) -> Path | None:
        """Write records. In one thread at a time."""
        if not records:
            return None
        first = records[0][0]
        self.reason = reason[:200]
        info = {**self._header.info, "ring": self.reason, "first_seq": str(first)}
        header = msgspec.structs.replace(self._header, part=self.num_dumps, info=info)
        try:
            writer = LogWriter(
                self._directory,
                header,
                max_bytes=1 << 62,
                redacted=self._redacted,
                locked=True,
            )
        except ConfigError as error:
            self.reason = str(error)
            self.num_dropped += len(records)
            return None
        while records:
            for _ in range(min(_BATCH, len(records))):
                writer.record(*records.popleft())
            if pause_s:
                # The interpreter is one: whoever waits for it goes first.
                time.sleep(pause_s)
        writer.close()
        self.num_dropped += writer.num_dropped
        self.num_dumps += 1
        writer.remove_before(self.num_dumps - self._max_files)
        return writer.path

    def close(self) -> None:
        """Write what is wanted, forget the rest: an orderly end is no reason to write."""
        self.wait()
        if self._wanted:
            self.dump(self._wanted)
        self._records.clear()

    def _request_time(self) -> int:
        try:
            return (self._directory / REQUEST_FILE).stat().st_mtime_ns
        except OSError:
            return 0


def ask_for_dumps(directory: Path) -> None:
    """Ask every ring that logs to this directory to write what it keeps.

    Raises:
        OSError: the directory cannot be written.
    """
    (directory / REQUEST_FILE).touch(mode=0o600)
