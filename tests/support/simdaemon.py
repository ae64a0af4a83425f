"""One rank's daemon in the scheduler core's simulation, with its store and its rank's memory."""

from kvcommon.messages import JobEnd, JobOutcome, LoadJob, SaveJob, StepPlan, StepVerdict
from tests.support.simpool import POOL, SIZE, Slots, right


class Daemon:
    """One rank's daemon, with the part of the store that it fills and its rank's memory."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.epoch = 10 + rank
        self.alive = True
        self.reachable = True
        self.memory: list[Slots] = [[None] * SIZE for _ in range(POOL)]
        self.store: dict[bytes, Slots] = {}
        self.loads: dict[int, LoadJob] = {}
        self.saves: dict[int, tuple[int, SaveJob]] = {}
        #: Save job → what was read: hash → content.
        self.read: dict[int, dict[bytes, Slots]] = {}
        self.outbox: list[JobEnd] = []
        self.acks: list[int] = []

    def take_plan(self, plan: StepPlan) -> None:
        self.acks.append(plan.step)
        for load in plan.loads:
            self.loads[load.job_id] = load
        for save in plan.saves:
            self.saves[save.job_id] = (plan.step, save)

    def load(self, job_id: int, *, fail: bool) -> set[int]:
        """Carry out a load; return the blocks that failed."""
        job = self.loads.pop(job_id)
        failed = set()
        for block, block_hash in zip(job.block_ids, job.block_hashes, strict=True):
            data = self.store.get(block_hash)
            if data is None or (fail and block == job.block_ids[-1]):
                failed.add(block)
                self.memory[block] = [None] * SIZE
            else:
                self.memory[block] = list(data)
        outcome = JobOutcome.FAILED if failed else JobOutcome.DONE
        self.outbox.append(
            JobEnd(job_id=job_id, outcome=outcome, failed_blocks=tuple(sorted(failed)))
        )
        return failed

    def cancel(self, job_id: int) -> set[int]:
        job = self.loads.pop(job_id)
        self.outbox.append(JobEnd(job_id=job_id, outcome=JobOutcome.CANCELLED))
        return set(job.block_ids)

    def read_save(self, job_id: int) -> None:
        """Read the blocks of a save, unless their key is stored or open already."""
        _, job = self.saves[job_id]
        opened = {h for data in self.read.values() for h in data}
        self.read[job_id] = {
            block_hash: list(self.memory[block])
            for block, block_hash in zip(job.block_ids, job.block_hashes, strict=True)
            if block_hash not in self.store and block_hash not in opened
        }

    def end_save(self, job_id: int, outcome: JobOutcome) -> None:
        del self.saves[job_id]
        self.read.pop(job_id, None)
        self.outbox.append(JobEnd(job_id=job_id, outcome=outcome))

    def judge(self, verdict: StepVerdict, known: dict[bytes, tuple[str, int]], era: int) -> None:
        """Publish or revoke what the step's saves have written."""
        for job_id in [j for j, (step, _) in self.saves.items() if step == verdict.step]:
            if job_id in verdict.tainted:
                self.end_save(job_id, JobOutcome.CANCELLED)
                continue
            if job_id not in self.read:
                self.read_save(job_id)
            data = self.read[job_id]
            for block_hash, slots in data.items():
                text, index = known[block_hash]
                assert slots == right(text, index, era), f"wrong bytes published: job {job_id}"
            self.store.update(data)
            self.end_save(job_id, JobOutcome.DONE if data else JobOutcome.SKIPPED)

    def die(self) -> None:
        self.alive = False
        self.loads.clear()
        self.saves.clear()
        self.read.clear()
        self.outbox.clear()
        self.acks.clear()
