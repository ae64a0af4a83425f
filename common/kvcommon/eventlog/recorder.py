"""Wraps a core, numbers its events and records them with its answers.

The shell calls the recorder instead of the core, from the one thread that owns the core. Without
a writer it only counts.
"""

import sys
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from kvcommon.eventlog.format import stimulus

EventT_contra = TypeVar("EventT_contra", bound=msgspec.Struct, contravariant=True)
CommandT = TypeVar("CommandT", bound=msgspec.Struct)


class Core(Protocol[EventT_contra, CommandT]):
    """A pure core: events in, commands out."""

    def handle(self, event: EventT_contra, /) -> list[CommandT]:
        """Take in one event and answer what is to be done, in order."""

    def validate(self) -> None:
        """Raise if an invariant does not hold."""


class Writer(Protocol):
    """Where records go: a ``LogWriter``, or what stands in for one."""

    def record(
        self,
        seq: int,
        cause: str,
        event: msgspec.Struct,
        commands: Sequence[msgspec.Struct],
        fault: str = "",
    ) -> None:
        """Append one record; never raises for a full disk."""

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""


class Recorder(Generic[EventT_contra, CommandT]):
    """A core with a log."""

    def __init__(
        self,
        core: Core[EventT_contra, CommandT],
        writer: Writer | None,
        name: str,
        *,
        validate: bool = False,
    ) -> None:
        """Wrap a core that has not been told anything yet.

        Args:
            core: the core; told things by nobody else from now on.
            writer: of the log called ``name``; None: nothing is recorded.
            name: the log's name, also when nothing is recorded (it goes out in causes).
            validate: check the core's invariants after each event.
        """
        self._core = core
        self._writer = writer
        self._name = name
        self._validate = validate
        #: Number of the event that is being handled, or was last.
        self.seq = 0

    @property
    def stimulus(self) -> str:
        """``<log name>:<seq>`` of the event at hand: the cause of what the shell now does."""
        return stimulus(self._name, self.seq)

    def handle(self, event: EventT_contra, cause: str = "") -> list[CommandT]:
        """Tell the core, record, and return its commands.

        Args:
            event: what happened.
            cause: the peer's stimulus (``Envelope.cause``), if a message brought it.

        Raises:
            Whatever the core raises: it is in the log, flushed, with the event and the fault.
        """
        self.seq += 1
        writer = self._writer
        if writer is None and not self._validate:
            return self._core.handle(event)
        answered = False
        try:
            commands = self._core.handle(event)
            if self._validate:
                self._core.validate()
            answered = True
        finally:
            if writer is not None and not answered:
                writer.record(self.seq, cause, event, (), _fault())
                writer.flush()
        if writer is not None:
            writer.record(self.seq, cause, event, commands)
        return commands


def _fault() -> str:
    """One line about the exception in flight."""
    error = sys.exc_info()[1]
    return f"{type(error).__name__}: {error}"[:2000]
