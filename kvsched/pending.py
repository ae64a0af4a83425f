"""What the model side still waits for: the data conversation and the asynchronous loads."""

import time
from collections.abc import Iterable

from kvcommon.ids import EngineId, Epoch
from kvcommon.messages import JobEnd, JobsEnded, Message, Refused
from kvsched.core.commands import ModelLoad
from kvsched.link import DaemonLink, LinkChange

#: Ends of jobs that nobody asked for yet; past that the oldest are dropped (they were given up).
_MAX_ENDS = 1024


class DataLink:
    """The conversation about steps. Owned by the thread that runs the model.

    A new attachment (a daemon came back) is a new generation: the conversation is reopened before
    the next message, and the old one's messages are gone.
    """

    def __init__(self, link: DaemonLink, engine: EngineId, epoch: Epoch) -> None:
        """Take a closed link; the first ``send`` opens it."""
        self._link = link
        self._engine = engine
        self._epoch = epoch
        self._generation = 0
        self._ends: dict[int, JobEnd] = {}

    def send(self, message: Message, generation: int) -> bool:
        """Say something about a step. False: nobody is attached, or the queue is full."""
        if generation == 0:
            return False
        if generation != self._generation:
            self._link.open(self._engine, self._epoch)
            self._generation = generation
        return self._link.send(message)

    def drain(self, timeout_ms: float = 0) -> None:
        """Take in what has arrived; wait for something at most ``timeout_ms``."""
        message = self._link.receive(timeout_ms)
        while message is not None:
            if isinstance(message, JobsEnded):
                for end in message.ends:
                    self._ends[end.job_id] = end
            elif isinstance(message, (LinkChange, Refused)):
                # The daemon does not know this conversation (any more): the next message opens one.
                self._generation = 0
                break
            message = self._link.receive()
        while len(self._ends) > _MAX_ENDS:
            del self._ends[next(iter(self._ends))]

    def take(self, job_id: int) -> JobEnd | None:
        """Return how a job ended, once, if that has arrived."""
        return self._ends.pop(job_id, None)

    def wait_for(self, job_ids: Iterable[int], timeout_ms: float) -> dict[int, JobEnd]:
        """Wait for the ends of these jobs; those that do not come in time are left out."""
        missing, found = list(job_ids), {}
        deadline = time.monotonic() + timeout_ms / 1e3
        while missing:
            for job_id in list(missing):
                if (end := self.take(job_id)) is not None:
                    found[job_id] = end
                    missing.remove(job_id)
            left_ms = (deadline - time.monotonic()) * 1e3
            if not missing or left_ms <= 0 or self._generation == 0:
                # The last: there is no conversation in which anything could be said.
                break
            self.drain(left_ms)
        return found

    def close(self) -> None:
        """End the conversation."""
        self._link.close()


class AsyncLoads:
    """Loads between steps, each reported to vLLM exactly once, whatever happens to the daemon."""

    def __init__(self, timeout_ns: int) -> None:
        """Every load is given up ``timeout_ns`` after its step began."""
        self._timeout_ns = timeout_ns
        #: By job: the load, its deadline, and the attachment that it was planned under.
        self._open: dict[int, tuple[ModelLoad, int, int]] = {}

    def __len__(self) -> int:
        """Number of loads not reported yet."""
        return len(self._open)

    def add(self, loads: Iterable[ModelLoad], now_ns: int, serving: int) -> None:
        """Take in planned loads. ``serving``: ``Attachment.serving``; 0: nobody will do them."""
        deadline_ns = now_ns + self._timeout_ns
        for load in loads:
            self._open[load.job_id] = (load, deadline_ns, serving)

    def collect(self, data: DataLink, now_ns: int, serving: int) -> tuple[set[str], set[int]]:
        """Return (requests whose load has ended, blocks that hold wrong bytes).

        A load of another attachment than ``serving`` has ended: its daemon is gone.
        """
        data.drain()
        requests: set[str] = set()
        failed: set[int] = set()
        for job_id, (load, deadline_ns, planned_under) in list(self._open.items()):
            end = data.take(job_id)
            if end is not None:
                failed.update(end.failed_blocks)
            elif serving and serving == planned_under and now_ns < deadline_ns:
                continue
            else:
                failed.update(load.block_ids)
            del self._open[job_id]
            requests.add(load.request_id)
        return requests, failed
