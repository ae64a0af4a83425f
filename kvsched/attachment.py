"""Keeps a daemon informed of this worker's memory, in a thread of its own.

The thread says ``Attach`` when the daemon is there (or comes back), answers the daemon's read-back
check, and sends heartbeats independent of traffic. The thread that runs the model only reads
``attached`` and ``generation``.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from kvcommon.ids import EngineId, Epoch
from kvcommon.memory.page import ProgressPage, expected_answer
from kvcommon.messages import Attach, Attached, Detach, Heartbeat, JobsEnded, Refused
from kvsched.link import DaemonLink, LinkChange

logger = logging.getLogger("vllm.kvferry.attachment")

#: After a refusal that says trying again will not help.
_REFUSED_S = 10.0
_BROKEN_S = 0.1
#: A daemon that cannot be connected to for so long is not there.
_ABSENT_S = 2.0
#: How long a daemon may take to let go of our memory when we leave.
_RELEASE_S = 1.0
_RELEASE_NAP_MS = 5.0


class Attachment:
    """One rank's attachment to its daemon."""

    def __init__(
        self,
        make_link: Callable[[], DaemonLink],
        engine: EngineId,
        epoch: Epoch,
        *,
        export: Callable[[], Attach],
        page: ProgressPage,
        heartbeat_ms: float,
        proven: Callable[[], bool] = lambda: True,
    ) -> None:
        """Start the thread.

        Args:
            make_link: Makes the control conversation's link, inside the thread.
            engine: vLLM's engine id.
            epoch: Incarnation of this model side.
            export: Exports the memory afresh; called once per attach.
            page: The progress page, for the read-back check.
            heartbeat_ms: How often to say something.
            proven: Says whether the daemon has answered in the memory itself, where it is asked to.
        """
        self._make_link = make_link
        self._engine = engine
        self._epoch = epoch
        self._export = export
        self._page = page
        self._heartbeat_s = heartbeat_ms / 1e3
        self._proven = proven
        self._stop = threading.Event()
        #: Ends the thread's wait for the daemon, together with ``_stop``.
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._refused = ""
        #: That there is no daemon has been said, and nothing has changed since.
        self._missed = False
        #: The daemon has mapped our memory and is alive as far as we know.
        self.attached = False
        #: What the daemon can do, of the newest attachment.
        self.capabilities: tuple[str, ...] = ()
        #: Counts attachments; 0 before the first. A change means: reopen the data conversation.
        self.generation = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-attach", daemon=True)
        self._thread.start()

    @property
    def serving(self) -> int:
        """Which attachment holds now, by its generation; 0: none does."""
        return self.generation if self.attached else 0

    def close(self) -> None:
        """Detach and stop the thread, bounded. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(timeout=_RELEASE_S + 1.0)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _run(self) -> None:
        link = self._make_link()
        try:
            while not self._stop.is_set():
                pause_s = self._converse(link)
                self.attached = False
                self._stop.wait(pause_s)
        except Exception:
            self.attached = False
            logger.exception("kvferry: attach thread ended; this engine serves without the cache")
        finally:
            link.close()

    def _converse(self, link: DaemonLink) -> float:
        """Hold one conversation until it breaks; returns how long to wait before the next."""
        # An answer of an earlier daemon must not pass for this one's.
        self._page.renew()
        link.open(self._engine, self._epoch)
        attach = self._export()
        link.send(attach)
        absent_at = time.monotonic() + _ABSENT_S
        # By the clock, not after silence: the daemon's own heartbeats break every silence.
        due = time.monotonic() + self._heartbeat_s
        connected = False
        while not self._stop.is_set():
            wake_at = due if connected or self._missed else min(due, absent_at)
            link.wait(max(0.0, wake_at - time.monotonic()) * 1e3, self._wake_fd)
            if time.monotonic() >= due:
                due = time.monotonic() + self._heartbeat_s
                # Attached or not: the lease counts from ``Attach`` on, and mapping may take long.
                if connected:
                    link.send(Heartbeat())
            changes = list(link.changes())
            if LinkChange.DISCONNECTED in changes:
                if self.attached:
                    logger.warning("kvferry: the daemon has gone; waiting for it to come back")
                    self._missed = True
                # Not at once: whoever is there may be hanging up on everybody.
                return _BROKEN_S
            connected = connected or bool(changes)
            if not connected:
                self._look_for(link.endpoint, attach.device, absent_at)
            while (message := link.receive()) is not None:
                # A monitor says nothing of inproc:// connections; what arrives does.
                connected = True
                if isinstance(message, Attached):
                    self._attached(message)
                elif isinstance(message, Refused):
                    return self._was_refused(message)
                elif isinstance(message, LinkChange):
                    return _BROKEN_S
                elif isinstance(message, JobsEnded):
                    logger.warning("kvferry: job ends on the control conversation; ignored")
        link.send(Detach(reason="the engine shuts down"))
        self._wait_for_release(link)
        return 0.0

    def _look_for(self, endpoint: str, device: str, absent_at: float) -> None:
        """Nobody is there yet: from ``absent_at`` on say so, once."""
        inside = endpoint.startswith("inproc:")  # nobody reports connections there
        if self._missed or inside or time.monotonic() < absent_at:
            return
        self._missed = True
        logger.warning(
            "kvferry: no daemon at %s; this engine serves without the cache until there is one, "
            "and attaches to it by itself. Start one: kvworker serve --device %s --endpoint %s",
            endpoint,
            device,
            endpoint,
        )

    def _wait_for_release(self, link: DaemonLink) -> None:
        """Wait until the daemon has let go of the memory: it must do so before we free it."""
        deadline = time.monotonic() + _RELEASE_S
        while self.attached and self._page.answered() and time.monotonic() < deadline:
            link.wait(_RELEASE_NAP_MS)
            while link.receive() is not None:
                pass
            if LinkChange.DISCONNECTED in link.changes():
                return

    def _attached(self, message: Attached) -> None:
        if self._page.answered() != expected_answer(self._page.nonce):
            logger.error("kvferry: the daemon says it mapped our memory, but its mark is missing")
            return
        if not self._proven():
            logger.error(
                "kvferry: the daemon does not see this engine's device memory; it must run on the "
                "same card"
            )
            return
        self.capabilities = message.capabilities
        self._refused = ""
        self._missed = False
        self.generation += 1
        self.attached = True
        logger.info(
            "kvferry: attached to the daemon (pid %d, %s)",
            message.pid,
            ", ".join(message.capabilities) or "no special capabilities",
        )
        if message.differences:
            logger.warning(
                "kvferry: what this daemon has stored so far cannot be used by this engine: %s",
                "; ".join(message.differences),
            )

    def _was_refused(self, message: Refused) -> float:
        if message.resync:
            return _BROKEN_S
        if message.reason != self._refused:
            self._refused = message.reason
            logger.error(
                "kvferry: the daemon refuses this engine: %s. %s %s",
                message.reason,
                message.remedy,
                "; ".join(message.differences),
            )
        return _REFUSED_S
