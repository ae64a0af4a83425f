"""Scheduler sides: who plans for a rank, and what becomes of the plans of one that went away."""

from kvcommon import reasons
from kvcommon.ids import Fingerprint
from kvcommon.keys import namespace_prefix
from kvcommon.messages import Hello, Welcome
from kvworker.core.breaker import Breaker
from kvworker.core.commands import ResetNamespace
from kvworker.core.engines import Engine
from kvworker.core.events import StoreReset
from kvworker.core.jobs import JobBook
from kvworker.core.kernel import Kernel
from kvworker.core.loads import Loads
from kvworker.core.saves import Saves
from kvworker.core.states import SaveState


def welcome(kernel: Kernel, engine: Engine) -> None:
    """Tell the scheduler side whether the rank is attached."""
    config = kernel.config
    body = Welcome(
        pid=config.pid,
        device=config.device,
        attached=engine.attached,
        store=config.store,
        event_log=config.event_log,
    )
    kernel.to_scheduler(engine.key, body)


class Schedulers:
    """Greets scheduler sides and settles what they leave behind."""

    def __init__(
        self, kernel: Kernel, book: JobBook, breaker: Breaker, saves: Saves, loads: Loads
    ) -> None:
        self._kernel = kernel
        self._book = book
        self._breaker = breaker
        self._saves = saves
        self._loads = loads
        #: Resets in flight: op → rank.
        self.resets: dict[int, Engine] = {}

    def hello(self, engine: Engine, epoch: int, hello: Hello) -> None:
        """Open, or open again, the conversation with a scheduler side.

        Messages may have been lost before a conversation is opened again. So jobs that the
        scheduler side does not believe open are given up (it may have given their blocks away),
        and so are saves that wait for a verdict (it may never come).
        """
        if engine.steps_epoch not in {0, epoch}:
            # The same model side under a new scheduler side: steps are counted anew.
            engine.progress.reset()
            engine.steps_epoch = 0
        engine.scheduler_epoch = epoch
        engine.ranks = hello.ranks
        welcome(self._kernel, engine)
        if self._breaker.down:
            self._breaker.tell(engine)
        # First, so that what is given up below is not told twice.
        self._book.report_again(engine, hello.open_jobs, reasons.DAEMON_LOST)
        believed = frozenset(hello.open_jobs)
        for save_batch in self._saves.of(engine):
            jobs = [
                job
                for job in save_batch.jobs
                if job.key.epoch != epoch
                or job.key.job_id not in believed
                or not save_batch.verdict
            ]
            self._saves.give_up(save_batch, jobs, reasons.ENGINE_LOST)
        for load_batch in self._loads.of(engine):
            jobs = [
                job
                for job in load_batch.jobs
                if job.key.epoch != epoch or job.key.job_id not in believed
            ]
            self._loads.give_up(load_batch, jobs, reasons.ENGINE_LOST)

    def lost(self, engine: Engine) -> None:
        """The scheduler side is gone: what waits for its verdict is given up, the rest goes on."""
        engine.scheduler_epoch = 0
        for batch in self._saves.of(engine):
            if not batch.verdict:
                self._saves.give_up(batch, tuple(batch.jobs), reasons.ENGINE_LOST)

    def reset(self, engine: Engine) -> None:
        """Forget what the engine has stored, and let nothing that it computed so far be stored."""
        marks = [rank.fingerprint for rank in engine.ranks]
        if engine.attached:
            marks.append(engine.mark)
        prefixes = [namespace_prefix(Fingerprint(mark)) for mark in marks]
        engine.reset_prefixes = tuple(dict.fromkeys([*engine.reset_prefixes, *prefixes]))
        for batch in self._saves.of(engine):
            self._saves.give_up(batch, tuple(batch.jobs), reasons.CANCELLED)
        self.advance_reset(engine)

    def advance_reset(self, engine: Engine) -> None:
        """Remove what is to be removed, unless something of it is just being published."""
        if not engine.reset_prefixes or self._breaker.down:
            return
        if any(batch.state is SaveState.CLOSING for batch in self._saves.of(engine)):
            return
        command = ResetNamespace(op=self._kernel.next_op(), prefixes=engine.reset_prefixes)
        engine.reset_prefixes = ()
        op = self._kernel.start(command, self._reset)
        self.resets[op] = engine

    def _reset(self, event: StoreReset) -> None:
        del self.resets[event.op]
        self._kernel.count("objects_removed", event.num_removed)
