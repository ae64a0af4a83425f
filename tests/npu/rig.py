"""A daemon, an engine process on a device, and the scheduler side, for tests."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcommon.ids import Fingerprint
from kvcommon.messages import (
    Hello,
    JobEnd,
    JobsEnded,
    LoadJob,
    Lookup,
    LookupGroup,
    LookupResult,
    PlanAck,
    RankIdentity,
    SaveJob,
    StepPlan,
    StepVerdict,
    Welcome,
)
from tests.conformance.devices.memory import DeviceProcess
from tests.npu.content import layer_bytes
from tests.support.client import Client
from tests.support.daemonproc import DaemonProcess, daemon

#: Nothing in these tests takes longer.
LOAD_MS = 20_000.0


@contextlib.contextmanager
def adversarial(seed: int, delay_us: int = 2500, **more: str) -> Iterator[None]:
    """Processes that start now have a device that is slow and out of order."""
    before = dict(os.environ)
    os.environ.update(CANN_DOUBLE_SEED=str(seed), CANN_DOUBLE_DELAY_US=str(delay_us), **more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def mapped_segments(pid: int) -> int:
    """Device memory of others that a process maps."""
    text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return sum("memfd:cann-d" in line for line in text.splitlines())


class Engine:
    """An engine's two sides: a process with a device, and the scheduler side here."""

    def __init__(
        self,
        served: DaemonProcess,
        cache: str,
        process: DeviceProcess,
        name: str = "e",
        rank: int = 0,
    ) -> None:
        self.process = process
        self._served = served
        self._name, self._rank = name, rank
        _, mark, self.object_bytes = self.process.ask(
            "start", served.endpoint, name, cache, rank, LOAD_MS
        )
        self.fingerprint = Fingerprint(mark)
        self.generation = 0
        self.scheduler: Client | None = None
        self.layers: list[int] = self.process.ask("layer_sizes")

    def attach(self) -> tuple[str, ...]:
        """Wait until the daemon has mapped the memory; both sides know. Its capabilities."""
        self.generation += 1
        found = self.process.ask("attached", self.generation)
        self.say_hello()
        return tuple(found)

    def say_hello(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        self.scheduler = Client(self._served.endpoint, "scheduler", self._name, self._rank)
        ranks = (RankIdentity(rank=self._rank, fingerprint=self.fingerprint),)
        self.scheduler.say(Hello(pid=os.getpid(), ranks=ranks))
        assert self.scheduler.hear(Welcome).attached

    def content(self, seed: int, block: int) -> bytes:
        """What ``save`` computes into a block."""
        return b"".join(
            layer_bytes(seed, block, layer, size) for layer, size in enumerate(self.layers)
        )

    def hashes(self, seed: int, blocks: Sequence[int]) -> tuple[bytes, ...]:
        return tuple(bytes([seed % 256, block]) * 16 for block in blocks)

    def save(self, step: int, seed: int, blocks: Sequence[int]) -> JobEnd:
        """Compute blocks in one step and store them."""
        assert self.scheduler is not None
        job = SaveJob(
            job_id=step,
            request_id="r",
            group=0,
            block_ids=tuple(blocks),
            block_hashes=self.hashes(seed, blocks),
        )
        self.scheduler.say(StepPlan(step=step, saves=(job,)))
        self.process.ask("save", step, seed, list(blocks))
        self.scheduler.hear(PlanAck)
        self.scheduler.say(StepVerdict(step=step))
        return self.scheduler.hear(JobsEnded).ends[0]

    def hits(self, lookup: int, seed: int, blocks: Sequence[int]) -> int:
        """How many of the blocks are stored, from the first on."""
        assert self.scheduler is not None
        groups = (LookupGroup(group=0, block_hashes=self.hashes(seed, blocks)),)
        self.scheduler.say(Lookup(lookup_id=lookup, request_id="r", groups=groups))
        result = self.scheduler.hear(LookupResult)
        return result.hits[0].num_blocks if result.hits else 0

    def plan_load(
        self, step: int, seed: int, stored: Sequence[int], into: Sequence[int], *, layerwise: bool
    ) -> None:
        assert self.scheduler is not None
        job = LoadJob(
            job_id=step,
            request_id="r",
            group=0,
            block_ids=tuple(into),
            block_hashes=self.hashes(seed, stored),
            layerwise=layerwise,
        )
        self.scheduler.say(StepPlan(step=step, loads=(job,)))
        self.scheduler.hear(PlanAck)

    def load(
        self, step: int, seed: int, stored: Sequence[int], into: Sequence[int]
    ) -> tuple[list[bytes], JobEnd]:
        """Load layer by layer, reading each layer as attention would."""
        assert self.scheduler is not None
        self.plan_load(step, seed, stored, into, layerwise=True)
        seen, failed = self.process.ask("load", step, step, list(into))
        assert not failed
        return seen, self.scheduler.hear(JobsEnded).ends[0]

    def load_async(
        self, step: int, seed: int, stored: Sequence[int], into: Sequence[int]
    ) -> JobEnd:
        assert self.scheduler is not None
        self.plan_load(step, seed, stored, into, layerwise=False)
        self.process.ask("begin", step, step, list(into))
        assert self.process.ask("finished") == []
        return self.scheduler.hear(JobsEnded).ends[0]

    def leave(self) -> None:
        """Detach, and free the memory as soon as the daemon has let go of it. Idempotent."""
        if self.scheduler is not None:
            self.scheduler.close()
            self.scheduler = None
            if self.process.process.poll() is None:
                self.process.ask("leave")


@contextlib.contextmanager
def engine_process(index: int = 0) -> Iterator[DeviceProcess]:
    """A process for engines on a card, one after another."""
    process = DeviceProcess("tests.npu.engine_main", str(index))
    try:
        yield process
    finally:
        process.close()


@contextlib.contextmanager
def engine(
    served: DaemonProcess, cache: str, process: DeviceProcess, name: str = "e", rank: int = 0
) -> Iterator[Engine]:
    """An engine that leaves at the end of the block."""
    made = Engine(served, cache, process, name, rank)
    try:
        yield made
    finally:
        made.leave()


@contextlib.contextmanager
def npu_daemon(
    *options: str, number: int = 0, directory: Path | None = None
) -> Iterator[DaemonProcess]:
    """A daemon for a card."""
    with daemon(*options, device=f"npu:{number}", directory=directory) as running:
        yield running
