"""What the serving thread does in each turn: read, tell the core, carry out, watch, tick.

Owned by one thread. Nothing here waits: the shell's poll does.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from kvcommon.messages import Attach, Detach, Heartbeat, Hello, ModelToDaemon, SchedulerToDaemon
from kvworker.assembly import Machinery
from kvworker.conversations import Asked, Conversations, Heard, Lost, Said
from kvworker.core.commands import SendToModel, SendToScheduler, WorkerCommand
from kvworker.core.events import ModelSaid, PeerLost, SchedulerSaid, Ticked, WorkerEvent
from kvworker.inbox import Inbox
from kvworker.liveness import ProcessWatch
from kvworker.peers import PeerKey, Role

logger = logging.getLogger("kvferry.worker")

_TICK_NS = 250_000_000
#: Lost records are logged once in so long.
_COMPLAINT_NS = 60_000_000_000
_NS_PER_MS = 1_000_000
#: Messages handled before the inbox and the clock are looked at again.
_BATCH = 256


class Loop:
    """Joins conversations, core, executor and process watch."""

    def __init__(
        self,
        talk: Conversations,
        machinery: Machinery,
        watch: ProcessWatch,
        inbox: Inbox,
        heartbeat_ms: float,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self.now_ns = clock_ns()
        self._talk = talk
        self._machinery = machinery
        self._watch = watch
        self._inbox = inbox
        self._heartbeat_ns = int(heartbeat_ms * _NS_PER_MS)
        self._next_tick_ns = 0
        #: Lost records that were complained of, and when to complain of more.
        self._num_dropped = 0
        self._next_complaint_ns = 0

    @property
    def wait_ms(self) -> int:
        """How long the poll may wait, milliseconds, rounded up."""
        return -(min(0, self._clock_ns() - self._next_tick_ns) // _NS_PER_MS)

    def turn(self, descriptors: Sequence[int], answer: Callable[[Asked], None]) -> bool:
        """Handle what is waiting: dead processes, messages, answers of the executor, time.

        Args:
            descriptors: Readable file descriptors.
            answer: Answers a status request.

        Returns:
            True if this turn was a tick (a few times a second).
        """
        self.now_ns = self._clock_ns()
        for descriptor in descriptors:
            name = self._watch.ended(descriptor)
            if isinstance(name, PeerKey):
                self._talk.drop(name, "its process ended")
        self._report_losses()
        for heard in self._talk.receive(_BATCH, self.now_ns):
            self._hear(heard, answer)
        # What the threads have posted meanwhile has happened before now, not before this turn.
        self.now_ns = self._clock_ns()
        for event in self._inbox.take():
            # The core's clock is when we saw it, and never goes back.
            self._tell(msgspec.structs.replace(event, now_ns=self.now_ns))
        self._report_losses()
        if self.now_ns < self._next_tick_ns:
            return False
        self._next_tick_ns = self.now_ns + _TICK_NS
        self._tick()
        return True

    def _hear(self, heard: Heard, answer: Callable[[Asked], None]) -> None:
        if isinstance(heard, Said):
            self._said(heard)
        elif isinstance(heard, Lost):
            self._lost(heard)
        else:
            answer(heard)

    def _said(self, said: Said) -> None:
        """Tell the core what a peer said; heartbeats have done their work already."""
        peer, body = said.peer, said.body
        if isinstance(body, (Attach, Hello)):
            self._watch.watch(peer.key, body.pid)
        if isinstance(body, Detach):
            self._watch.forget(peer.key)
        if isinstance(body, Heartbeat):
            return
        now_ns, engine, epoch = self.now_ns, peer.key.engine, peer.epoch
        # Conversations let each role say only what the core's event takes.
        if peer.key.role is Role.SCHEDULER:
            plan = cast("SchedulerToDaemon", body)
            self._tell(
                SchedulerSaid(now_ns=now_ns, engine=engine, epoch=epoch, body=plan), said.cause
            )
        else:
            word = cast("ModelToDaemon", body)
            self._tell(ModelSaid(now_ns=now_ns, engine=engine, epoch=epoch, body=word), said.cause)

    def _lost(self, lost: Lost) -> None:
        logger.warning(
            "lost the %s side of %s: %s", lost.key.role.side, lost.key.engine, lost.reason
        )
        self._watch.forget(lost.key)
        self._tell(
            PeerLost(
                now_ns=self.now_ns,
                engine=lost.key.engine,
                role=lost.key.role.side,
                epoch=lost.epoch,
                reason=lost.reason,
            )
        )

    def _report_losses(self) -> None:
        for lost in self._talk.lost():
            self._lost(lost)

    def _tell(self, event: WorkerEvent, cause: str = "") -> None:
        """Tell the core, and carry out what it answers."""
        for command in self._machinery.recorder.handle(event, cause):
            self._carry_out(command)

    def _carry_out(self, command: WorkerCommand) -> None:
        if isinstance(command, (SendToModel, SendToScheduler)):
            role = Role.MODEL if isinstance(command, SendToModel) else Role.SCHEDULER
            cause = self._machinery.recorder.stimulus
            self._talk.send(command.engine, role, command.body, cause, self.now_ns)
        else:
            self._machinery.executor.submit(command)

    def _tick(self) -> None:
        self._tell(Ticked(now_ns=self.now_ns))
        watched = {peer.key.of_side for peer in self._talk.peers} & self._watch.names
        self._talk.tick(self.now_ns, self._heartbeat_ns, watched)
        self._report_losses()
        writer = self._machinery.writer
        if writer is not None:
            writer.flush()
            self._complain_of(writer.num_dropped)

    def _complain_of(self, num_dropped: int) -> None:
        """Say that the event log loses records, but not with every record."""
        if num_dropped <= self._num_dropped or self.now_ns < self._next_complaint_ns:
            return
        self._num_dropped = num_dropped
        self._next_complaint_ns = self.now_ns + _COMPLAINT_NS
        logger.warning(
            "the event log has lost %d records, as its files cannot be written: is the disk full? "
            "Serving goes on",
            num_dropped,
        )
