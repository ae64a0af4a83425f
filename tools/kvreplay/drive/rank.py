"""Both sides of one rank of an engine, played to a daemon, with memory that is checked."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvcommon import messages as msg
from kvcommon.ids import BlockHash, Fingerprint
from kvcommon.keys import fingerprint, store_key
from kvreplay.drive.link import Link, Links
from kvreplay.drive.memory import KVMemory
from kvreplay.drive.needs import renamed
from kvreplay.drive.outcomes import Tally
from kvreplay.ops import OWN_REQUEST, Job, plan_jobs

#: Stands for the process of a side: a daemon watches it, and it can be ended alone.
_STAND_IN: Final = [sys.executable, "-c", "import sys; sys.stdin.read()"]
#: Jobs and steps of the newest steps are kept.
_MAX_STEPS: Final = 4096


@dataclass
class StepState:
    """What was planned for a step, and how far it is."""

    loads: list[msg.LoadJob] = field(default_factory=list)
    saves: list[msg.SaveJob] = field(default_factory=list)
    begun: bool = False
    has_verdict: bool = False
    num_computed: int = 0
    #: Layers whose announcement was looked at.
    num_seen: int = 0


@dataclass(frozen=True)
class Setting:
    """What all ranks of a run share."""

    links: Links
    seed: int
    #: Word in the namespaces of this run.
    word: str
    device: str
    endpoint: str
    tally: Tally


class Rank:
    """One rank: what it says, what its memory must hold, how its jobs ended."""

    def __init__(self, name: str, setting: Setting) -> None:
        """Nothing is said yet; ``name`` is ``<engine id>#<rank>``."""
        self.name = name
        self.engine, _, rank = name.rpartition("#")
        self.rank = int(rank) if rank.isdecimal() else 0
        self._setting = setting
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._links: dict[str, Link] = {}
        self.memory: KVMemory | None = None
        self.attached: bool | None = None
        self.mark = ""
        #: As recorded, of the newest attach.
        self.last_attach: msg.Attach | None = None
        self._epoch = 0
        self.steps: dict[int, StepState] = {}
        self._jobs: dict[int, Job] = {}
        #: Layers that were announced before they were right: (job, block, layer).
        self._early: set[tuple[int, int, int]] = set()
        #: Begun steps whose layerwise loads have not ended.
        self._watched: set[int] = set()
        #: Blocks that no open job names, by group, and the last job that did.
        self._released: dict[tuple[int, int], int] = {}
        #: Hash → group, of every object that this rank has stored.
        self.stored: dict[tuple[int, bytes], None] = {}

    @property
    def open_jobs(self) -> AbstractSet[int]:
        """Jobs that were planned and have not ended."""
        return self._jobs.keys()

    def waits_for_us(self, job_id: int) -> bool:
        """The job is open, and may end only after more is said of its step."""
        job = self._jobs.get(job_id)
        for state in self.steps.values():
            if job is not None and (job in state.saves or job in state.loads):
                is_load = isinstance(job, msg.LoadJob)
                return not (state.begun if is_load else state.has_verdict)
        return False

    # -- saying --------------------------------------------------------------------------------

    def attach(self, attach: msg.Attach, epoch: int) -> None:
        """Attach with memory of the recorded layout."""
        self._drop("model", "data")
        if self.memory is not None:
            self.memory.close()
        memory = self.memory = KVMemory(attach.layout, self._setting.seed)
        self.last_attach = attach
        namespace = renamed(attach.namespace, self._setting.word)
        self.mark, self._epoch, self.attached = fingerprint(namespace), epoch, None
        self.steps.clear()
        self._watched.clear()
        self._released.clear()
        body = msg.Attach(
            pid=self._process("model"),
            device=self._setting.device,
            storages=memory.handles(),
            layout=attach.layout,
            page=memory.page.handle,
            namespace=namespace,
        )
        self._link("model", epoch).say(body)

    def hello(self, hello: msg.Hello, epoch: int, marks: Mapping[str, str]) -> None:
        """Open the scheduler side's conversation; ``marks``: recorded fingerprint → ours."""
        old = self._links.get("scheduler")
        if old is not None and old.channel.epoch != epoch:
            self._drop("scheduler")
        ranks = tuple(
            msg.RankIdentity(rank=one.rank, fingerprint=marks.get(one.fingerprint, "unknown"))
            for one in hello.ranks
        )
        link = self._link("scheduler", epoch)
        link.channel.reset()
        link.say(msg.Hello(pid=self._process("scheduler"), ranks=ranks, open_jobs=hello.open_jobs))

    def scheduler(self, body: msg.Message) -> None:
        """Say something as the scheduler side; memory is made ready for it."""
        link = self._links.get("scheduler")
        if link is None:
            return
        if isinstance(body, msg.StepPlan):
            self._planned(body)
        elif isinstance(body, msg.StepVerdict) and body.step in self.steps:
            self.steps[body.step].has_verdict = True
        elif isinstance(body, msg.ResetStore):
            self.stored.clear()
        link.say(body)

    def model(self, body: msg.Message) -> None:
        """Say something as the model side; memory is made to fit it."""
        if "model" not in self._links:
            return
        if isinstance(body, msg.Detach):
            self._links["model"].say(body)
            self.attached = False
            return
        if isinstance(body, msg.StepBegun):
            self._begin(body.step)
        elif isinstance(body, msg.LayersComputed):
            self._compute(body.step, body.num_layers)
        self._link("data", self._epoch).say(body)

    def lose(self, role: str) -> None:
        """A side's process dies."""
        self._drop(*(("model", "data") if role == "model" else ("scheduler",)))
        process = self._processes.pop(role, None)
        if process is not None:
            _end(process)
        if role == "model":
            self.attached = False

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        self._drop(*list(self._links))
        for process in self._processes.values():
            _end(process)
        self._processes.clear()
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    # -- hearing -------------------------------------------------------------------------------

    def owns(self, link: Link) -> bool:
        """The conversation is one of this rank's."""
        return link in self._links.values()

    def heard(self, body: msg.FromDaemon) -> None:
        """Take in what the daemon said to one of the sides."""
        if isinstance(body, msg.Attached):
            self.attached = True
        elif isinstance(body, msg.Refused):
            self.attached = bool(self.attached)
            self._setting.tally.fault(f"{self.name} is refused: {body.reason}")
        elif isinstance(body, msg.JobsEnded):
            for end in body.ends:
                self._ended(end)

    def layers_ready(self, step: int, num_layers: int) -> bool:
        """The layerwise loads of a step are this far; what was announced is checked."""
        state = self.steps.get(step)
        loads = [job for job in state.loads if job.layerwise] if state else []
        open_loads = [job for job in loads if job.job_id in self._jobs]
        if not open_loads or self.memory is None or state is None:
            return True
        done, _ = self.memory.page.read(step)
        seen, state.num_seen = state.num_seen, max(state.num_seen, min(done, num_layers))
        for job in open_loads:
            for block_id, block_hash in zip(job.block_ids, job.block_hashes, strict=False):
                for layer in range(seen, min(state.num_seen, self.memory.num_layers(job.group))):
                    if not self._right(job.group, block_id, layer, block_hash):
                        self._early.add((job.job_id, block_id, layer))
        return done >= num_layers

    def watch(self) -> bool:
        """Look at what is announced now, as a model would; True while there is more to come."""
        if self.memory is not None:
            layers = max((len(group.layers) for group in self.memory.layout.groups), default=0)
            self._watched = {one for one in self._watched if not self.layers_ready(one, layers)}
        return bool(self._watched)

    def check_released(self) -> None:
        """Nobody has written into a block after the end of its jobs."""
        for place in list(self._released):
            self._take(*place)

    # -- memory --------------------------------------------------------------------------------

    def _planned(self, plan: msg.StepPlan) -> None:
        state = self.steps.setdefault(plan.step, StepState())
        while len(self.steps) > _MAX_STEPS:
            del self.steps[next(iter(self.steps))]
        state.loads, state.saves = list(plan.loads), list(plan.saves)
        memory = self.memory
        if memory is None:
            return
        for job in plan_jobs(plan):
            self._jobs[job.job_id] = job
            for block_id, block_hash in self._blocks(job):
                self._take(job.group, block_id)
                computed = isinstance(job, msg.SaveJob) and job.computed
                if not computed:
                    memory.spoil(job.group, block_id)
                layers = memory.num_layers(job.group) if computed else state.num_computed
                if isinstance(job, msg.SaveJob):
                    for layer in range(layers):
                        memory.write(job.group, block_id, layer, self._key(job.group, block_hash))
        if state.begun:
            self._watched.add(plan.step)

    def _begin(self, step: int) -> None:
        """The gate of a step opens: until now nobody may have written into its blocks."""
        state = self.steps.setdefault(step, StepState())
        state.begun = True
        self._watched.add(step)
        for job in state.loads:
            if self.memory is None or job.job_id not in self._jobs:
                continue
            for block_id, _ in self._blocks(job):
                if not self.memory.is_spoilt(job.group, block_id):
                    text = f"{self.name}: block {block_id} of job {job.job_id} was written before"
                    self._setting.tally.fault(f"{text} step {step} had begun")

    def _compute(self, step: int, num_layers: int) -> None:
        """The model has computed layers: the blocks to be saved get their bytes."""
        state = self.steps.setdefault(step, StepState())
        for job in state.saves:
            if self.memory is None or job.computed or job.job_id not in self._jobs:
                continue
            for block_id, block_hash in self._blocks(job):
                key = self._key(job.group, block_hash)
                for layer in range(
                    state.num_computed, min(num_layers, self.memory.num_layers(job.group))
                ):
                    self.memory.write(job.group, block_id, layer, key)
        state.num_computed = max(state.num_computed, num_layers)

    def _ended(self, end: msg.JobEnd) -> None:
        job = self._jobs.pop(end.job_id, None)
        if job is None or self.memory is None:
            return
        good = end.outcome is msg.JobOutcome.DONE
        partly = good or (end.outcome is msg.JobOutcome.FAILED and bool(end.failed_blocks))
        for block_id, block_hash in self._blocks(job):
            if isinstance(job, msg.LoadJob):
                if partly:
                    self._check(job, block_id, block_hash, end)
            elif good and block_id not in end.failed_blocks:
                self.stored[job.group, block_hash] = None
                self._setting.tally.keys.add(self._key(job.group, block_hash))
        self._release(job)

    def _release(self, job: Job) -> None:
        """From here on nobody touches the job's blocks, unless another job names them too."""
        assert self.memory is not None
        others = {
            (one.group, block_id)
            for one in self._jobs.values()
            for block_id in one.block_ids
            if one.group == job.group
        }
        for block_id, _ in self._blocks(job):
            if (job.group, block_id) not in others:
                self.memory.spoil(job.group, block_id)
                self._released[job.group, block_id] = job.job_id

    def _take(self, group: int, block_id: int) -> None:
        """A job names a block: is it as its last job has left it?"""
        last = self._released.pop((group, block_id), None)
        if last is None or self.memory is None or self.memory.is_spoilt(group, block_id):
            return
        text = f"{self.name}: block {block_id} was written after job {last} had ended"
        self._setting.tally.fault(text)

    def _check(self, job: msg.LoadJob, block_id: int, block_hash: bytes, end: msg.JobEnd) -> None:
        if block_id in end.failed_blocks or self.memory is None:
            return
        tally = self._setting.tally
        tally.num_checked += 1
        for layer in range(self.memory.num_layers(job.group)):
            name = f"{self.name}: layer {layer} of block {block_id}"
            if not self._right(job.group, block_id, layer, block_hash):
                tally.fault(f"{name} holds wrong bytes after job {job.job_id}")
                return
            if (job.job_id, block_id, layer) in self._early:
                tally.fault(f"{name} was announced before its bytes were there")
                return

    def _right(self, group: int, block_id: int, layer: int, block_hash: bytes) -> bool:
        assert self.memory is not None
        return self.memory.is_right(group, block_id, layer, self._key(group, block_hash))

    def _key(self, group: int, block_hash: bytes) -> str:
        return store_key(Fingerprint(self.mark), group, BlockHash(block_hash))

    def _blocks(self, job: Job) -> list[tuple[int, bytes]]:
        """Blocks of a job that exist; a recording may hold bad plans."""
        limit = self.memory.num_blocks(job.group) if self.memory else 0
        pairs = zip(job.block_ids, job.block_hashes, strict=False)
        return [pair for pair in pairs if 0 < pair[0] < limit]

    # -- conversations -------------------------------------------------------------------------

    def _link(self, role: str, epoch: int) -> Link:
        if role not in self._links:
            endpoint = self._setting.endpoint
            self._links[role] = self._setting.links.open(
                endpoint, role, self.engine, self.rank, epoch
            )
        return self._links[role]

    def _drop(self, *roles: str) -> None:
        for role in roles:
            link = self._links.pop(role, None)
            if link is not None:
                self._setting.links.drop(link)

    def _process(self, side: str) -> int:
        process = self._processes.get(side)
        if process is None:
            process = self._processes[side] = subprocess.Popen(_STAND_IN, stdin=subprocess.PIPE)
        return process.pid


def save_job(number: int, group: int, blocks: Sequence[tuple[int, bytes]]) -> msg.SaveJob:
    """Save these (block, hash) pairs, which are computed."""
    return msg.SaveJob(
        job_id=number,
        request_id=OWN_REQUEST,
        group=group,
        block_ids=tuple(block for block, _ in blocks),
        block_hashes=tuple(one for _, one in blocks),
        computed=True,
    )


def load_job(number: int, group: int, blocks: Sequence[tuple[int, bytes]]) -> msg.LoadJob:
    """Load these (block, hash) pairs between steps."""
    saved = msgspec.structs.asdict(save_job(number, group, blocks))
    del saved["computed"]
    return msg.LoadJob(**saved, layerwise=False)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
