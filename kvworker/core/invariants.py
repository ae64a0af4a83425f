"""Every invariant of the core, asserted. Run after each event in tests, behind a flag elsewhere."""

from collections import Counter

from kvcommon.messages import JobOutcome
from kvworker.core.commands import ClosePuts, LoadLayers
from kvworker.core.engines import Engine, Engines
from kvworker.core.jobs import JobBook
from kvworker.core.kernel import Kernel
from kvworker.core.load_batch import LoadBatch
from kvworker.core.loads import Loads
from kvworker.core.parts import Parts
from kvworker.core.save_batch import SaveBatch
from kvworker.core.saves import Saves
from kvworker.core.states import BlockState, JobState, LoadState, MapState, SaveState

_SAVES_IN_FLIGHT = (SaveState.OPENING, SaveState.WRITING, SaveState.CLOSING)
_LOADS_IN_FLIGHT = (LoadState.OPENING, LoadState.LOADING, LoadState.CLOSING)


def check(parts: Parts) -> None:
    """Assert every invariant."""
    check_jobs(parts.book, parts.saves, parts.loads)
    check_saves(parts.kernel, parts.saves)
    check_loads(parts.kernel, parts.loads)
    check_engines(parts.engines, parts.saves, parts.loads)
    check_operations(parts)


def check_jobs(book: JobBook, saves: Saves, loads: Loads) -> None:
    """Each open job is in exactly one batch; an ended one is in none and known as ended."""
    placed = Counter(job.key for batch in saves.batches for job in batch.jobs)
    placed.update(job.key for batch in loads.batches for job in batch.jobs)
    assert all(number == 1 for number in placed.values()), "a job is in two batches"
    assert set(placed) == set(book.open), "open jobs and batches differ"
    assert not set(book.open) & set(book.ended), "a job is open and ended"
    for key, job in book.open.items():
        assert job.key == key
        assert job.state is not JobState.ENDED, f"{job.name} is open and ended"
    for key, ended in book.ended.items():
        assert ended.end.job_id == key.job_id
        if ended.end.outcome in {JobOutcome.DONE, JobOutcome.SKIPPED}:
            assert not ended.end.failed_blocks, f"{key} ended well with failed blocks"


def check_saves(kernel: Kernel, saves: Saves) -> None:
    """One writer per key; a key is ended only whole, wanted and after the verdict."""
    owners: dict[str, SaveBatch] = {}
    for batch in saves.batches:
        assert batch.state is not SaveState.CLOSED, batch.name
        assert (batch.state in _SAVES_IN_FLIGHT) == bool(batch.op), batch.name
        keys = list(batch.leftover)
        for job in batch.jobs:
            for block in job.blocks:
                if block.held or block.state is BlockState.OPENING:
                    keys.append(block.key)
                if block.state is BlockState.OPEN:
                    assert block.held, f"{job.name} writes without a session"
        for key in keys:
            assert key not in owners, f"two puts are open on {key}"
            owners[key] = batch
        if batch.state is SaveState.CLOSING:
            _check_closing(kernel, batch)
    assert owners == saves.writers, "writers and batches differ"


def _check_closing(kernel: Kernel, batch: SaveBatch) -> None:
    command = kernel.operations[batch.op].command
    assert isinstance(command, ClosePuts)
    assert not command.end or batch.verdict, f"{batch.name} is published without a verdict"
    for key in command.end:
        owners = [(j, b) for j in batch.jobs for b in j.blocks if b.key == key and b.held]
        assert len(owners) == 1, f"{key} is ended, and no open job wants it"
        job, block = owners[0]
        assert job.state is JobState.OPEN, f"{job.name} was given up and is published"
        assert batch.is_complete(block), f"{key} is ended with bytes missing"


def check_loads(kernel: Kernel, loads: Loads) -> None:
    """References balance; nothing is read into blocks before the gate."""
    held = Counter(key for batch in loads.batches for key in batch.held)
    assert held == Counter(loads.references), "get references do not balance"
    for batch in loads.batches:
        assert batch.state is not LoadState.CLOSED, batch.name
        assert (batch.state in _LOADS_IN_FLIGHT) == bool(batch.op), batch.name
        if batch.held:
            assert batch.state in {LoadState.OPEN, LoadState.LOADING}, batch.name
        if batch.state is LoadState.LOADING:
            _check_loading(kernel, batch)


def _check_loading(kernel: Kernel, batch: LoadBatch) -> None:
    command = kernel.operations[batch.op].command
    assert isinstance(command, LoadLayers)
    assert set(command.keys) <= set(batch.held), f"{batch.name} reads without a session"
    assert len(set(command.keys)) == len(command.keys), f"{batch.name} reads a key twice"
    # Steps may be counted anew under a load that is being cancelled.
    if batch.engine.incarnation == batch.incarnation and not batch.stopping:
        assert batch.engine.progress.gate >= batch.step, f"{batch.name} writes before its gate"


def check_engines(engines: Engines, saves: Saves, loads: Loads) -> None:
    """A rank's state, its memory and what works on it agree."""
    for engine in engines:
        in_flight = engine.state in {MapState.MAPPING, MapState.UNMAPPING}
        assert in_flight == bool(engine.op), engine.key
        if engine.attached:
            assert engine.attach is not None, engine.key
            assert engine.model_epoch, engine.key
            assert engine.waiting is None, engine.key
        num_batches = len(saves.of(engine)) + len(loads.of(engine))
        assert engine.num_batches == num_batches, engine.key
        _check_memory(engine, saves, loads)


def _check_memory(engine: Engine, saves: Saves, loads: Loads) -> None:
    """Jobs of memory that is going, or gone, have been given up."""
    batches: list[SaveBatch | LoadBatch] = [*saves.of(engine), *loads.of(engine)]
    for batch in batches:
        if engine.attached and batch.incarnation == engine.incarnation:
            continue
        if batch.state is not SaveState.CLOSING:
            unwanted = all(job.state is JobState.CANCELLING for job in batch.jobs)
            assert unwanted, f"{batch.name} works on memory that is not mapped"


def check_operations(parts: Parts) -> None:
    """Everything in flight belongs to something, and to one thing only."""
    owned = [engine.op for engine in parts.engines if engine.op]
    owned += [batch.op for batch in parts.saves.batches if batch.op]
    owned += [batch.op for batch in parts.loads.batches if batch.op]
    owned += parts.lookups.open.values()
    owned += parts.schedulers.resets
    owned += [parts.breaker.op] if parts.breaker.op else []
    assert len(owned) == len(set(owned)), "an operation belongs to two"
    assert set(owned) == set(parts.kernel.operations), "operations and their owners differ"
