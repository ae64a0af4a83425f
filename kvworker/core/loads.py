"""Loads: opened at once, read into blocks only after the step has begun (rule 5).

A batch has at most one operation in flight. Whatever happens changes the batch's data and then
calls ``advance``, which alone decides what is done next. One ``LoadLayers`` never names a key
twice: where two jobs of a batch load the same object, the second copy comes in another round.
"""

from collections.abc import Sequence
from functools import partial

from kvcommon import reasons
from kvcommon.layout import GroupLayout
from kvworker.core.breaker import Breaker
from kvworker.core.commands import CloseGets, LoadLayers, OpenGets, PublishProgress
from kvworker.core.engines import Engine
from kvworker.core.events import GetsClosed, GetsOpened, LayersLoaded
from kvworker.core.jobs import Job, JobBook, Part
from kvworker.core.kernel import Kernel
from kvworker.core.load_batch import MAX_STEP, MEANING, LoadBatch, PageTurn
from kvworker.core.states import BlockState, JobState, LoadState
from kvworker.outcome import Outcome

#: Slots of the progress page: an older step's word would overwrite that of a newer one.
_PAGE_SLOTS = 64


class Loads:
    """All load batches of a core."""

    def __init__(self, kernel: Kernel, book: JobBook, breaker: Breaker) -> None:
        self._kernel = kernel
        self._book = book
        self._breaker = breaker
        self.batches: list[LoadBatch] = []
        #: Key → get references held, over all batches.
        self.references: dict[str, int] = {}

    def of(self, engine: Engine) -> tuple[LoadBatch, ...]:
        """Return the batches of a rank, oldest first."""
        return tuple(batch for batch in self.batches if batch.engine is engine)

    def plan(
        self,
        engine: Engine,
        step: int,
        layerwise: Sequence[tuple[GroupLayout, list[Job]]],
        asynchronous: Sequence[tuple[GroupLayout, list[Job]]],
        refused: bool,
    ) -> None:
        """Take in the loads of a plan, by group.

        Args:
            engine: The rank; it is attached.
            step: Of the plan.
            layerwise: Loads that the step waits for on the progress page.
            asynchronous: Loads between steps.
            refused: A layerwise load of the plan has failed already.
        """
        batches = [
            LoadBatch(engine, engine.incarnation, step, group, jobs, None)
            for group, jobs in asynchronous
        ]
        if layerwise or refused:
            assert engine.attach is not None
            groups = engine.attach.layout.groups
            page = PageTurn(step, sum(len(group.layers) for group in groups))
            page.num_open, page.failed = len(layerwise), refused
            page.by_layer = len(layerwise) == len(groups) == 1
            layerwise_batches = [
                LoadBatch(engine, engine.incarnation, step, group, jobs, page)
                for group, jobs in layerwise
            ]
            batches = layerwise_batches + batches
            if not layerwise:
                self._publish(engine, page)
        self.batches.extend(batches)
        engine.num_batches += len(batches)
        for batch in batches:
            self.advance(batch)

    def model_moved(self, engine: Engine) -> None:
        """Steps have begun."""
        for batch in self.of(engine):
            self.advance(batch)

    def give_up(self, batch: LoadBatch, jobs: Sequence[Job], reason: str) -> None:
        """Give these open jobs up: at once, or when what is in flight has answered."""
        for job in jobs:
            job.cancel(reason)
        unwanted = all(job.state is JobState.CANCELLING for job in batch.jobs)
        in_flight = batch.op and batch.state is not LoadState.CLOSING
        if in_flight and unwanted and not batch.stopping:
            batch.stopping = True
            self._kernel.cancel(batch.op)
        self.advance(batch)

    def advance(self, batch: LoadBatch) -> None:
        """Do what can be done now. Nothing while an operation is in flight."""
        if batch.op or batch.state is LoadState.CLOSED:
            return
        if self._breaker.down:
            for part in batch.parts(BlockState.WAITING) + batch.parts(BlockState.OPEN):
                batch.lose(part.block, BlockState.FAILED, reasons.STORE_DOWN)
        self._settle(batch)
        if batch.state is LoadState.PLANNED and batch.jobs:
            self._open(batch)
        elif not batch.jobs:
            self._close(batch)
        elif batch.engine.progress.gate >= batch.step:
            self._load(batch)

    def _open(self, batch: LoadBatch) -> None:
        parts = batch.parts(BlockState.WAITING)
        keys = tuple(dict.fromkeys(part.block.key for part in parts))
        for part in parts:
            part.block.move(BlockState.OPENING)
        command = OpenGets(
            op=self._kernel.next_op(),
            engine=batch.engine.key,
            step=batch.step,
            group=batch.group.group,
            keys=keys,
        )
        batch.move(LoadState.OPENING)
        batch.op = self._kernel.start(command, partial(self._opened, batch, keys))

    def _opened(self, batch: LoadBatch, keys: Sequence[str], event: GetsOpened) -> None:
        self._breaker.note(event.outcomes)
        self._answered(batch)
        outcomes = dict(zip(keys, event.outcomes, strict=True))
        batch.held = tuple(key for key in keys if outcomes[key] is Outcome.OK)
        for key in batch.held:
            self.references[key] = self.references.get(key, 0) + 1
        for part in batch.parts(BlockState.OPENING):
            outcome = outcomes[part.block.key]
            if outcome is Outcome.OK:
                part.block.move(BlockState.OPEN)
            else:
                batch.lose(part.block, *MEANING[outcome])
        self.advance(batch)

    def _load(self, batch: LoadBatch) -> None:
        """Read the next round: every key that waits for its bytes, once."""
        parts = batch.parts(BlockState.OPEN)
        first: dict[str, Part] = {}
        for part in parts:
            first.setdefault(part.block.key, part)
        this_round = tuple(first.values())
        page = batch.page
        publish = page is not None and page.by_layer and len(this_round) == len(parts)
        command = LoadLayers(
            op=self._kernel.next_op(),
            engine=batch.engine.key,
            step=batch.step,
            group=batch.group.group,
            keys=tuple(part.block.key for part in this_round),
            block_ids=tuple(part.block.block_id for part in this_round),
            first_layer=0,
            end_layer=len(batch.group.layers),
            publish=publish,
            tainted=publish and page is not None and page.failed,
            event=batch.engine.progress.event,
        )
        if publish and page is not None:
            page.published = True
        batch.move(LoadState.LOADING)
        batch.op = self._kernel.start(command, partial(self._loaded, batch, this_round))

    def _loaded(self, batch: LoadBatch, parts: Sequence[Part], event: LayersLoaded) -> None:
        self._breaker.note(event.outcomes)
        self._answered(batch)
        for (job, block), outcome in zip(parts, event.outcomes, strict=True):
            job.moved_bytes(event.started_ns, event.now_ns)
            if outcome is Outcome.OK:
                block.num_bytes = batch.group.object_bytes
                block.move(BlockState.DONE)
            else:
                if batch.page is not None:
                    # The page may have been told that the last layer is good; say it again.
                    batch.page.published = False
                batch.lose(block, *MEANING[outcome])
        self.advance(batch)

    def _close(self, batch: LoadBatch) -> None:
        """Nothing is left to load: tell the page, give references back."""
        if not batch.over:
            batch.over = True
            if batch.page is not None:
                batch.page.num_open -= 1
                if batch.page.num_open == 0 and not batch.page.published and batch.current:
                    self._publish(batch.engine, batch.page)
        if not batch.held:
            self._finish(batch)
            return
        for key in batch.held:
            self.references[key] -= 1
            if not self.references[key]:
                del self.references[key]
        command = CloseGets(op=self._kernel.next_op(), engine=batch.engine.key, keys=batch.held)
        batch.held = ()
        batch.move(LoadState.CLOSING)
        batch.op = self._kernel.start(command, partial(self._closed, batch))

    def _closed(self, batch: LoadBatch, _event: GetsClosed) -> None:
        batch.op = 0
        self._finish(batch)

    def _publish(self, engine: Engine, page: PageTurn) -> None:
        """Let whoever waits for the step's layers go on."""
        is_recent = page.step + _PAGE_SLOTS > engine.progress.begun
        if 0 < page.step <= MAX_STEP and is_recent:
            command = PublishProgress(
                engine=engine.key,
                step=page.step,
                num_layers=page.num_layers,
                failed=page.failed,
            )
            self._kernel.out.append(command)

    def _answered(self, batch: LoadBatch) -> None:
        """What was in flight has ended."""
        batch.op = 0
        batch.stopping = False
        batch.move(LoadState.OPEN)

    def _settle(self, batch: LoadBatch) -> None:
        """End the jobs that were given up, and those none of whose blocks is live."""
        for job in tuple(batch.jobs):
            if job.state is JobState.CANCELLING:
                for block in tuple(job.live()):
                    batch.lose(block, BlockState.CANCELLED, job.reason)
            if any(True for _ in job.live()):
                continue
            batch.jobs.remove(job)
            self._book.end(job)

    def _finish(self, batch: LoadBatch) -> None:
        """Forget a batch that holds nothing."""
        assert not batch.jobs, batch.name
        assert not batch.held, batch.name
        batch.move(LoadState.CLOSED)
        self.batches.remove(batch)
        batch.engine.num_batches -= 1
