"""Says how far a step is when the device has got there, not when the model has asked it to.

On a device the hooks run ahead of the kernels. So what is said about a step is stamped where it is
said, and sent by a helper thread once the stamp means something to the daemon: as an event that the
daemon waits for, or, where events cannot be shared, after the helper has waited itself. The thread
that runs the model never waits for the device here.
"""

import logging
import queue
import threading
import time

import msgspec

from kvcommon.ids import EngineId, Epoch
from kvcommon.memory.clock import DeviceClock
from kvcommon.messages import EVENTS, LayersComputed, Message, StepBegun
from kvsched.attachment import Attachment
from kvsched.link import DaemonLink
from kvsched.pending import DataLink

logger = logging.getLogger("vllm.kvferry.clocked")

#: Messages that wait for the device; past that they are refused, like on a full queue.
_MAX_WAITING = 1024
#: The link is given away at least so often while something is awaited, ms.
_SLICE_MS = 1.0

_Waiting = tuple[StepBegun | LayersComputed, int, int]


class ClockedDataLink(DataLink):
    """A ``DataLink`` whose messages about a step go by the device's clock.

    Both the thread that runs the model and the helper use the socket, one at a time.
    """

    def __init__(
        self,
        link: DaemonLink,
        engine: EngineId,
        epoch: Epoch,
        clock: DeviceClock,
        attachment: Attachment,
    ) -> None:
        """Start the helper."""
        super().__init__(link, engine, epoch)
        self._clock = clock
        self._attachment = attachment
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._helper = threading.Thread(target=self._run, name="kvferry-clock", daemon=True)
        self._helper.start()

    def send(self, message: Message, generation: int) -> bool:
        """Stamp and queue what is said about a step; send anything else at once."""
        if not isinstance(message, (StepBegun, LayersComputed)):
            with self._lock:
                return super().send(message, generation)
        if generation == 0 or self._waiting.qsize() >= _MAX_WAITING:
            return False
        self._waiting.put((message, generation, self._clock.stamp()))
        return True

    def drain(self, timeout_ms: float = 0) -> None:
        """Take in what has arrived, leaving the socket to the helper in between."""
        deadline = time.monotonic() + timeout_ms / 1e3
        known = len(self._ends)
        while True:
            left_ms = max(0.0, (deadline - time.monotonic()) * 1e3)
            with self._lock:
                super().drain(min(left_ms, _SLICE_MS))
            if left_ms == 0 or len(self._ends) != known:
                return

    def close(self) -> None:
        """End the helper and the conversation."""
        self._waiting.put(None)
        self._helper.join(timeout=1.0)
        with self._lock:
            super().close()

    def _run(self) -> None:
        try:
            self._clock.bind_thread()
            while (waiting := self._waiting.get()) is not None:
                self._pass_on(*waiting)
        except Exception:
            # Without these messages the daemon saves nothing and every load is given up in time.
            logger.exception("kvferry: clock thread ended; this engine serves without the cache")

    def _pass_on(self, message: StepBegun | LayersComputed, generation: int, stamp: int) -> None:
        shared = EVENTS in self._attachment.capabilities
        event = self._clock.settle(stamp, shared=shared)
        if generation != self._attachment.generation:
            return
        if event:
            message = msgspec.structs.replace(message, event=event)
        with self._lock:
            super().send(message, generation)
