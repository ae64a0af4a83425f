"""Saves: one batch per step and group, written layer by layer, published after the verdict.

A batch has at most one operation in flight. Whatever happens changes the batch's data and then
calls ``advance``, which alone decides what is done next. Rule 3: a key is ended only if every byte
of every layer was written, its job was not given up, and the step's verdict has come.
"""

from collections.abc import Sequence
from functools import partial

from kvcommon import reasons
from kvcommon.layout import GroupLayout
from kvworker.core.breaker import Breaker
from kvworker.core.commands import ClosePuts, OpenPuts, WriteLayers
from kvworker.core.engines import Engine
from kvworker.core.events import LayersWritten, PutsClosed, PutsOpened
from kvworker.core.jobs import Job, JobBook, Part
from kvworker.core.kernel import Kernel
from kvworker.core.save_batch import MEANING, SaveBatch
from kvworker.core.states import BlockState, JobState, SaveState
from kvworker.outcome import Outcome

_NS_PER_MS = 1_000_000


class Saves:
    """All save batches of a core."""

    def __init__(self, kernel: Kernel, book: JobBook, breaker: Breaker) -> None:
        self._kernel = kernel
        self._book = book
        self._breaker = breaker
        self.batches: list[SaveBatch] = []
        #: Key → the batch that opens, writes or closes it: one writer per object.
        self.writers: dict[str, SaveBatch] = {}

    def of(self, engine: Engine) -> tuple[SaveBatch, ...]:
        """Return the batches of a rank, oldest first."""
        return tuple(batch for batch in self.batches if batch.engine is engine)

    def plan(self, engine: Engine, step: int, group: GroupLayout, jobs: list[Job]) -> None:
        """Take in the saves of a plan."""
        batch = SaveBatch(engine, engine.incarnation, step, group, jobs)
        batch.ready = engine.ready_layers(step, group)
        self.batches.append(batch)
        engine.num_batches += 1
        self.advance(batch)

    def model_moved(self, engine: Engine) -> None:
        """Steps have begun, or layers were computed."""
        for batch in self.of(engine):
            if batch.incarnation == engine.incarnation and engine.attach is not None:
                ready = engine.ready_layers(batch.step, batch.group)
                batch.ready = max(batch.ready, ready)
                self.advance(batch)

    def verdict(self, engine: Engine, step: int, tainted: Sequence[int]) -> None:
        """The step's output is known: publish its saves but for the tainted ones."""
        for batch in self.of(engine):
            if batch.step == step:
                if not batch.verdict:
                    batch.verdict, batch.verdict_ns = True, self._kernel.now_ns
                jobs = [job for job in batch.jobs if job.key.job_id in tainted]
                self.give_up(batch, jobs, reasons.TAINTED)

    def give_up(self, batch: SaveBatch, jobs: Sequence[Job], reason: str) -> None:
        """Give these open jobs up: at once, or when what is in flight has answered.

        A batch that is being closed is past that; its jobs end as they end.
        """
        if batch.state is SaveState.CLOSING:
            return
        for job in jobs:
            job.cancel(reason)
        unwanted = all(job.state is JobState.CANCELLING for job in batch.jobs)
        if batch.op and unwanted and not batch.stopping:
            batch.stopping = True
            self._kernel.cancel(batch.op)
        self.advance(batch)

    def tick(self) -> None:
        """Stop waiting for layers that were due long ago."""
        grace_ns = self._kernel.config.verdict_grace_ms * _NS_PER_MS
        for batch in tuple(self.batches):
            if batch.verdict and self._kernel.now_ns - batch.verdict_ns > grace_ns:
                batch.hopeless = True
                self.advance(batch)

    def advance(self, batch: SaveBatch) -> None:
        """Do what can be done now. Nothing while an operation is in flight."""
        if batch.op or batch.state is SaveState.CLOSED:
            return
        if batch.verdict and batch.engine.progress.begun > batch.step:
            batch.hopeless = True
        self._settle(batch)
        if self._breaker.down:
            self._fail(batch, (BlockState.WAITING, BlockState.OPEN), reasons.STORE_DOWN)
        if batch.state is SaveState.WAITING:
            self._advance_waiting(batch)
        else:
            self._advance_open(batch)

    def _advance_waiting(self, batch: SaveBatch) -> None:
        if not batch.jobs:
            self._finish(batch)
            return
        if batch.engine.progress.begun < batch.step and not batch.hopeless:
            return
        parts = []
        for part in tuple(batch.parts(BlockState.WAITING)):
            if part.block.key in self.writers:
                part.block.move(BlockState.SKIPPED, reasons.EXISTS)
            elif batch.hopeless and not batch.can_complete(part.job):
                part.block.move(BlockState.FAILED, reasons.LATE)
            else:
                self.writers[part.block.key] = batch
                part.block.move(BlockState.OPENING)
                parts.append(part)
        self._settle(batch)
        if not parts:
            self._finish(batch)
            return
        command = OpenPuts(
            op=self._kernel.next_op(),
            engine=batch.engine.key,
            step=batch.step,
            group=batch.group.group,
            keys=tuple(part.block.key for part in parts),
        )
        batch.move(SaveState.OPENING)
        batch.op = self._kernel.start(command, partial(self._opened, batch, parts))

    def _opened(self, batch: SaveBatch, parts: Sequence[Part], event: PutsOpened) -> None:
        self._breaker.note(event.outcomes)
        self._answered(batch)
        batch.whole = event.whole
        for (_, block), outcome in zip(parts, event.outcomes, strict=True):
            if outcome is Outcome.OK:
                block.held = True
                block.move(BlockState.OPEN)
            else:
                del self.writers[block.key]
                block.move(*MEANING[outcome])
        self.advance(batch)

    def _advance_open(self, batch: SaveBatch) -> None:
        if not batch.whole and self._write(batch):
            return
        live = tuple(batch.parts(BlockState.OPEN))
        complete = [part for part in live if batch.is_due(part.job, part.block)]
        if live and not batch.verdict:
            return
        if len(complete) < len(live) and not batch.hopeless:
            return
        for part in live:
            if part not in complete:
                part.block.move(BlockState.FAILED, reasons.LATE)
        if not batch.whole:
            self._close(batch, complete)
        elif complete:
            self._put_whole(batch, complete)
        else:
            self._release(batch)

    def _put_whole(self, batch: SaveBatch, parts: Sequence[Part]) -> None:
        """Store and publish these blocks in one call."""
        command = WriteLayers(
            op=self._kernel.next_op(),
            engine=batch.engine.key,
            step=batch.step,
            group=batch.group.group,
            keys=tuple(part.block.key for part in parts),
            block_ids=tuple(part.block.block_id for part in parts),
            first_layer=0,
            end_layer=batch.num_layers,
            event=batch.engine.progress.event,
            whole=True,
        )
        batch.move(SaveState.WRITING)
        batch.op = self._kernel.start(command, partial(self._stored, batch, parts))

    def _stored(self, batch: SaveBatch, parts: Sequence[Part], event: LayersWritten) -> None:
        self._breaker.note(event.outcomes)
        self._answered(batch)
        for (job, block), outcome, got in zip(parts, event.outcomes, event.num_bytes, strict=True):
            block.num_bytes += got
            job.moved_bytes(event.started_ns, event.now_ns)
            if outcome is not Outcome.OK:
                block.move(*MEANING[outcome])
            elif got != batch.group.object_bytes:
                self._kernel.count("short_writes")
                block.move(BlockState.FAILED, reasons.TRANSFER_FAILED)
            else:
                block.num_layers = batch.num_layers
                self._kernel.count("puts_ended", 1)
                block.move(BlockState.DONE)
        self.advance(batch)

    def _release(self, batch: SaveBatch) -> None:
        """Forget a batch that holds no session."""
        self._settle(batch)
        for key in batch.leftover:
            del self.writers[key]
        batch.leftover.clear()
        self._finish(batch)

    def _write(self, batch: SaveBatch) -> bool:
        """Write what became readable meanwhile, of blocks that are equally far."""
        parts: list[Part] = []
        first = end = 0
        for part in batch.parts(BlockState.OPEN):
            if batch.hopeless and not batch.can_complete(part.job):
                continue
            written, ready = part.block.num_layers, batch.ready_layers(part.job)
            if written < ready and not parts:
                first, end = written, ready
            if written < ready and (written, ready) == (first, end):
                parts.append(part)
        if not parts:
            return False
        command = WriteLayers(
            op=self._kernel.next_op(),
            engine=batch.engine.key,
            step=batch.step,
            group=batch.group.group,
            keys=tuple(part.block.key for part in parts),
            block_ids=tuple(part.block.block_id for part in parts),
            first_layer=first,
            end_layer=end,
            event=batch.engine.progress.event,
        )
        batch.move(SaveState.WRITING)
        batch.op = self._kernel.start(command, partial(self._written, batch, parts, command))
        return True

    def _written(
        self, batch: SaveBatch, parts: Sequence[Part], command: WriteLayers, event: LayersWritten
    ) -> None:
        self._breaker.note(event.outcomes)
        self._answered(batch)
        layers = batch.group.layers[command.first_layer : command.end_layer]
        due = sum(layer.block_bytes for layer in layers)
        for (job, block), outcome, got in zip(parts, event.outcomes, event.num_bytes, strict=True):
            block.num_bytes += got
            job.moved_bytes(event.started_ns, event.now_ns)
            if outcome is not Outcome.OK:
                block.move(*MEANING[outcome])
            elif got != due:
                self._kernel.count("short_writes")
                block.move(BlockState.FAILED, reasons.TRANSFER_FAILED)
            else:
                block.num_layers = command.end_layer
        self.advance(batch)

    def _close(self, batch: SaveBatch, complete: Sequence[Part]) -> None:
        """Publish these, discard the rest."""
        end = tuple(part.block.key for part in complete)
        ended, revoke = set(end), list(batch.leftover)
        for job in batch.jobs:
            held = (block.key for block in job.blocks if block.held)
            revoke.extend(key for key in held if key not in ended)
        if not end and not revoke:
            self._finish(batch)
            return
        command = ClosePuts(
            op=self._kernel.next_op(),
            engine=batch.engine.key,
            step=batch.step,
            end=end,
            revoke=tuple(revoke),
        )
        batch.move(SaveState.CLOSING)
        batch.op = self._kernel.start(command, partial(self._closed, batch, complete, command))

    def _closed(
        self, batch: SaveBatch, complete: Sequence[Part], command: ClosePuts, event: PutsClosed
    ) -> None:
        self._breaker.note(event.ended + event.revoked)
        batch.op = 0
        for key in (*command.end, *command.revoke):
            del self.writers[key]
        for job in batch.jobs:
            for block in job.blocks:
                block.held = False
        batch.leftover.clear()
        for (_, block), outcome in zip(complete, event.ended, strict=True):
            if outcome is Outcome.OK:
                block.move(BlockState.DONE)
            else:
                block.move(*MEANING[outcome])
        self._kernel.count("puts_ended", len(command.end))
        self._kernel.count("puts_revoked", len(command.revoke))
        self._settle(batch)
        self._finish(batch)

    def _answered(self, batch: SaveBatch) -> None:
        """What was in flight has ended."""
        batch.op = 0
        batch.stopping = False
        batch.move(SaveState.OPEN)

    def _fail(self, batch: SaveBatch, states: Sequence[BlockState], reason: str) -> None:
        """Fail the blocks that are in these states."""
        for state in states:
            for part in tuple(batch.parts(state)):
                part.block.move(BlockState.FAILED, reason)
        self._settle(batch)

    def _settle(self, batch: SaveBatch) -> None:
        """End the jobs that were given up, and those none of whose blocks is live."""
        for job in tuple(batch.jobs):
            if job.state is JobState.CANCELLING:
                for block in tuple(job.live()):
                    block.move(BlockState.CANCELLED, job.reason)
            if any(True for _ in job.live()):
                continue
            batch.leftover.extend(block.key for block in job.blocks if block.held)
            batch.jobs.remove(job)
            self._book.end(job)

    def _finish(self, batch: SaveBatch) -> None:
        """Forget a batch that holds nothing."""
        assert not batch.jobs, batch.name
        assert not batch.leftover, batch.name
        batch.move(SaveState.CLOSED)
        self.batches.remove(batch)
        batch.engine.num_batches -= 1
