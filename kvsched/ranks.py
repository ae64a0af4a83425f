"""The daemons of all ranks, seen as events of the scheduler side's core.

Threading: used by vLLM's scheduler thread alone. Nothing here blocks unless a time is given.

There is no thread of our own: sockets are drained from the hooks that vLLM calls. While the engine
is idle nobody listens, which is harmless: nothing of ours is pending then (vLLM keeps stepping
while ``has_pending_push_work`` says so), and daemons watch this process by its pidfd.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from kvcommon.ids import EngineId, Epoch
from kvcommon.messages import (
    FromDaemon,
    Heartbeat,
    Hello,
    JobsEnded,
    LookupResult,
    Message,
    PlanAck,
    RankIdentity,
    Refused,
    StoreHealth,
    StoreState,
    Welcome,
)
from kvsched.core.events import (
    DaemonLost,
    DaemonReady,
    FenceFailed,
    JobsReported,
    LookupAnswered,
    PlanAcked,
    SchedEvent,
    StoreChanged,
)
from kvsched.link import DaemonLink, LinkChange, ProcessWatch
from kvsched.silence import Silence, lived_ns

logger = logging.getLogger("vllm.kvferry.ranks")

#: A conversation is not reopened more often than this.
_REOPEN_NS = 100_000_000
#: After a refusal that says trying again will not help, we do try again this rarely: an operator
#: may have restarted the daemon with another configuration.
_REFUSED_NS = 10_000_000_000
#: A ``Hello`` that a connected daemon has not answered for so long is said again.
_UNANSWERED_NS = 2_000_000_000
#: A daemon that has come back answers a new ``Hello`` within this, or is not there yet.
_GREETING_NS = 20_000_000
_NS_PER_MS = 1_000_000

Emit = Callable[[SchedEvent, str], None]


def is_its_process(link: DaemonLink, pid: int) -> bool:
    """The kernel says that this process listens at the other end; and it is not ourselves."""
    return link.peer_pid == pid != os.getpid()


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's model side tells the scheduler side at start (handshake metadata)."""

    #: Position among all ranks of the engine: pipeline stages first, then tensor ranks.
    rank: int
    endpoint: str
    device: str
    #: Namespace fingerprint of the rank.
    fingerprint: str
    #: Bytes of one stored object of this rank, all groups summed.
    object_bytes: int
    block_size: int
    num_blocks: int


class Rank:
    """One rank's daemon."""

    def __init__(self, info: RankInfo, link: DaemonLink, watch: ProcessWatch) -> None:
        """Start out unconnected."""
        self.info = info
        self.link = link
        #: The daemon's process, once it has said who it is.
        self.watch = watch
        self.epoch = 0
        #: A connection was seen at least once, so that the next one is a reconnection.
        self.connected = False
        #: ``DaemonLost(dead=False)`` was told; its death is still to be told.
        self.suspect = False
        #: Its loss was logged, so that its return is to be.
        self.was_lost = False
        #: When to open a new conversation, monotonic ns; 0: no need.
        self.reopen_at = 0
        self.opened_at = 0
        self.sent_at = 0
        self.refused = ""
        #: The conversation's ``Hello`` was answered.
        self.welcomed = False
        #: Its process id, as it says itself.
        self.pid = 0
        #: It was killed, and its death is still to be told.
        self.fenced = False
        #: How long it has said nothing while we listened.
        self.silence = Silence()


class Ranks:
    """Conversations with every rank's daemon."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        engine: EngineId,
        epoch: Epoch,
        infos: Sequence[RankInfo],
        *,
        emit: Emit,
        open_jobs: Callable[[int], tuple[int, ...]],
        heartbeat_ms: float,
        on_welcome: Callable[[Welcome], None],
        may_kill: Callable[[DaemonLink, int], bool] = is_its_process,
        watch: Callable[[int], ProcessWatch] = ProcessWatch,
        patience_ns: Callable[[int], int] = lambda _rank: 0,
        lived: Callable[[int], int] = lived_ns,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Open a conversation with each rank's daemon (it need not be there yet).

        Args:
            context: Shared with an inline daemon, else the process's own.
            engine: vLLM's engine id.
            epoch: Incarnation of this scheduler side.
            infos: Every rank, in rank order.
            emit: Takes events of the core, with what caused them.
            open_jobs: The jobs that the core believes open on a rank.
            heartbeat_ms: How often to say something while we are being called at all.
            on_welcome: Is shown every ``Welcome`` before the core is told.
            may_kill: Whether the process of this id may be killed, because it surely is the daemon
                at the other end of this link and nothing else.
            watch: Watches a process by its id.
            patience_ns: How much silence of a rank's daemon may be excused by a starved host.
            lived: For how long a process has run or wanted to run, ns.
            now_ns: Monotonic clock.
        """
        self._engine = engine
        self._epoch = epoch
        self._emit = emit
        self._open_jobs = open_jobs
        self._heartbeat_ns = int(heartbeat_ms * 1e6)
        self._on_welcome = on_welcome
        self._watch_process = watch
        self._patience_ns = patience_ns
        self._lived_ns = lived
        self._now_ns = now_ns
        self._may_kill = may_kill
        self._polled_ns = now_ns()
        self._identities = tuple(
            RankIdentity(rank=info.rank, fingerprint=info.fingerprint) for info in infos
        )
        self._ranks = [
            Rank(info, DaemonLink(context, info.endpoint, info.rank, "scheduler"), watch(0))
            for info in infos
        ]
        for rank in self._ranks:
            self._reopen(rank, now_ns())

    @property
    def identities(self) -> tuple[RankIdentity, ...]:
        """Rank numbers and fingerprints, in rank order."""
        return self._identities

    def send(self, index: int, body: Message, cause: str) -> None:
        """Say something to the daemon of rank ``index``; a full queue is a lost daemon.

        What was not said is made up for by a new conversation's ``Hello``.
        """
        rank = self._ranks[index]
        if rank.link.send(body, cause):
            rank.sent_at = self._now_ns()
        elif not rank.suspect:
            self._break(rank, self._now_ns(), "its queue is full or closed")

    def poll(self) -> None:
        """Take in everything that has arrived, without waiting."""
        now_ns = self._now_ns()
        # While nobody listened nothing could be heard: of a long gap only so much counts.
        gap_ns, self._polled_ns = now_ns - self._polled_ns, now_ns
        gap_ns = min(gap_ns, 2 * self._heartbeat_ns)
        for rank in self._ranks:
            rank.silence.total_ns += gap_ns
            self._poll_changes(rank, now_ns)
            self._poll_messages(rank, now_ns)
            if (rank.suspect or rank.fenced) and rank.watch.is_dead():
                rank.suspect = rank.fenced = False
                self._tell_lost(rank, dead=True, reason="its process has ended")
            unanswered = rank.connected and not (rank.welcomed or rank.reopen_at)
            if unanswered and now_ns - rank.opened_at > _UNANSWERED_NS:
                rank.reopen_at = now_ns
            if rank.reopen_at and self._now_ns() >= rank.reopen_at:
                self._reopen(rank, now_ns)
            elif now_ns - rank.sent_at > self._heartbeat_ns and rank.welcomed and not rank.suspect:
                self.send(rank.info.rank, Heartbeat(), "")

    def silences(self) -> tuple[tuple[int, int], ...]:
        """(rank, ms) of those that have missed a heartbeat, while they may be alive.

        Time in which the host gave them no processor does not count, up to ``patience_ns``.
        """
        return tuple(
            (
                rank.info.rank,
                rank.silence.counted_ns(self._lived_ns(rank.pid), self._patience_ns(rank.info.rank))
                // _NS_PER_MS,
            )
            for rank in self._ranks
            if rank.epoch and rank.silence.total_ns > 2 * self._heartbeat_ns
        )

    def fence(self, index: int) -> None:
        """Kill the daemon of rank ``index``, or say why that cannot be."""
        rank = self._ranks[index]
        problem = "it is not surely that process"
        if self._may_kill(rank.link, rank.pid):
            problem = rank.watch.kill()
        logger.error(
            "kvferry: the daemon of %s (pid %d) has said nothing for %d ms and may still touch "
            "blocks: %s",
            rank.info.device,
            rank.pid,
            rank.silence.total_ns // _NS_PER_MS,
            f"{problem}; its blocks stay reserved" if problem else "it is killed",
        )
        if problem:
            self._emit(FenceFailed(now_ns=self._now_ns(), rank=index, reason=problem), "")
        else:
            rank.fenced = True

    def greeting(self) -> int | None:
        """Return a rank whose daemon was there before and may be about to answer a new hello."""
        now_ns = self._now_ns()
        for rank in self._ranks:
            if rank.epoch and not rank.welcomed and now_ns - rank.opened_at < _GREETING_NS:
                return rank.info.rank
        return None

    def wait(self, index: int, timeout_ms: float) -> bool:
        """Wait until the daemon of rank ``index`` has said something. False: it has not."""
        return self._ranks[index].link.wait(timeout_ms)

    def close(self) -> None:
        """End every conversation."""
        for rank in self._ranks:
            rank.link.close()
            rank.watch.close()

    def _poll_changes(self, rank: Rank, now_ns: int) -> None:
        for change in rank.link.changes():
            if change is LinkChange.DISCONNECTED:
                self._lost(rank, "the connection is gone")
            elif rank.connected:
                rank.reopen_at = now_ns
            else:
                rank.connected = True

    def _poll_messages(self, rank: Rank, now_ns: int) -> None:
        while (message := rank.link.receive()) is not None:
            rank.silence.heard()
            if isinstance(message, LinkChange):
                logger.warning("kvferry: conversation with %s is broken", rank.info.endpoint)
                self._break(rank, now_ns)
                return
            self._take(rank, message, now_ns)
            if rank.reopen_at:
                return

    def _take(self, rank: Rank, message: FromDaemon, now_ns: int) -> None:
        index, cause = rank.info.rank, rank.link.last_cause
        if isinstance(message, Welcome):
            self._welcome(rank, message, now_ns)
        elif isinstance(message, LookupResult):
            self._emit(LookupAnswered(now_ns=now_ns, rank=index, result=message), cause)
        elif isinstance(message, PlanAck):
            self._emit(PlanAcked(now_ns=now_ns, rank=index, step=message.step), cause)
        elif isinstance(message, JobsEnded):
            self._emit(JobsReported(now_ns=now_ns, rank=index, ends=message.ends), cause)
        elif isinstance(message, StoreHealth):
            up = message.state is StoreState.UP
            logger.log(
                logging.INFO if up else logging.WARNING,
                "kvferry: the store of %s is %s %s",
                rank.info.device,
                message.state.value,
                message.reason,
            )
            self._emit(StoreChanged(now_ns=now_ns, rank=index, up=up, reason=message.reason), cause)
        elif isinstance(message, Refused):
            self._refused(rank, message, now_ns)

    def _welcome(self, rank: Rank, message: Welcome, now_ns: int) -> None:
        epoch = rank.link.daemon_epoch
        if epoch != rank.epoch:
            rank.watch.close()
            rank.watch = self._watch_process(message.pid)
            rank.epoch = epoch
        if rank.was_lost:
            rank.was_lost = False
            logger.info("kvferry: the daemon of %s is back (pid %d)", rank.info.device, message.pid)
        rank.pid = message.pid
        rank.suspect = rank.fenced = False
        rank.welcomed = True
        rank.refused = ""
        self._on_welcome(message)
        self._emit(
            DaemonReady(
                now_ns=now_ns,
                rank=rank.info.rank,
                epoch=epoch,
                attached=message.attached,
                store=message.store,
            ),
            rank.link.last_cause,
        )

    def _refused(self, rank: Rank, message: Refused, now_ns: int) -> None:
        if message.resync:
            self._break(rank, now_ns)
            return
        if message.reason != rank.refused:
            rank.refused = message.reason
            logger.error(
                "kvferry: the daemon of %s refuses this engine: %s. %s The engine serves without "
                "the cache.",
                rank.info.device,
                message.reason,
                message.remedy,
            )
        self._lost(rank, message.reason)
        rank.reopen_at = now_ns + _REFUSED_NS

    def _break(
        self, rank: Rank, now_ns: int, reason: str = "the conversation is out of step"
    ) -> None:
        self._lost(rank, reason)
        rank.reopen_at = max(now_ns, rank.opened_at + _REOPEN_NS)

    def _lost(self, rank: Rank, reason: str) -> None:
        if rank.epoch == 0 or rank.suspect:
            return
        dead = rank.watch.is_dead()
        rank.suspect = not dead
        rank.was_lost = True
        logger.warning(
            "kvferry: lost the daemon of %s (%s); the engine serves without the cache",
            rank.info.device,
            reason,
        )
        self._tell_lost(rank, dead=dead, reason=reason)

    def _tell_lost(self, rank: Rank, *, dead: bool, reason: str) -> None:
        now_ns = self._now_ns()
        self._emit(DaemonLost(now_ns=now_ns, rank=rank.info.rank, dead=dead, reason=reason), "")
        if dead and rank.welcomed and not rank.reopen_at:
            # The next daemon finds our Hello, and its Welcome waits here, also while nobody polls.
            rank.reopen_at = max(now_ns, rank.opened_at + _REOPEN_NS)

    def _reopen(self, rank: Rank, now_ns: int) -> None:
        rank.reopen_at = 0
        rank.opened_at = rank.sent_at = now_ns
        rank.connected = rank.welcomed = False
        rank.link.open(self._engine, self._epoch)
        rank.link.send(
            Hello(
                pid=os.getpid(),
                ranks=self._identities,
                open_jobs=self._open_jobs(rank.info.rank),
            )
        )
