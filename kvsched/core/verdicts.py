"""From a step's output to the verdict on its saves (rule 3), and failed loads as vLLM saw them."""

from kvcommon.messages import StepVerdict
from kvsched.core.commands import SchedCommand
from kvsched.core.events import StepFinished
from kvsched.core.ranks import Rank
from kvsched.core.requests import SaveBar
from kvsched.core.state import CoreState
from kvsched.core.steps import SaveNote, StepRecord, first_in, spoiled


class Judge:
    """Decides once per step with jobs what may be published.

    The verdict also tells a daemon that the step has begun, should the model side's word be lost.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def finished(self, event: StepFinished) -> list[SchedCommand]:
        """A step's output is back from all ranks.

        Steps finish in order. An earlier step with saves that never finished never will: nothing
        of it is published. Said twice, or of a step without saves, it only tells of bad blocks.
        """
        commands: list[SchedCommand] = []
        current = None
        for record in self._state.steps.unfinished():
            if record.step < event.step:
                if record.saves:
                    self._state.counters["steps_missed"] += 1
                    record.tainted = {note.job_id: None for note in record.saves}
                commands += self._conclude(record)
            elif record.step == event.step:
                current = record
        bad = set(event.invalid_block_ids)
        if current is not None:
            bad |= current.failed_blocks
            self._measure(current, event)
        if bad:
            self._spoil(event.step, bad)
        if current is not None:
            commands += self._conclude(current)
        self._state.steps.finished_ns = event.now_ns
        self._state.steps.forget(job.job_id for job in self._state.ledger)
        return commands

    def taint_all(self) -> None:
        """Nothing that is still under way may be published."""
        for record in self._state.steps.unfinished():
            for note in record.saves:
                self._taint(record, note)

    def repeat(self, rank: Rank) -> list[SchedCommand]:
        """Say the verdicts again that a daemon with open jobs may not have heard.

        It was out of reach, or messages to it were lost; saying them twice does no harm.
        """
        commands: list[SchedCommand] = []
        waiting = set(self._state.ledger.open_on(rank.rank))
        for record in self._state.steps:
            if record.finished and not waiting.isdisjoint(record.jobs):
                commands += self._state.send_all([rank], _verdict(record))
        return commands

    def _measure(self, record: StepRecord, event: StepFinished) -> None:
        if not record.has_loads:
            duration_ns = self._state.steps.seconds(record, event.now_ns)
            self._state.worth.step_measured(record.num_tokens, duration_ns)

    def _spoil(self, step: int, bad: set[int]) -> None:
        """Blocks did not get their bytes: taint what was made of them, and bar who loaded them.

        Steps after this one that are already planned ran on the same wrong bytes.
        """
        state = self._state
        later = [record for record in state.steps.unfinished() if record.step >= step]
        tables = [record.blocks for record in state.requests.values()]
        tables += [note.table for record in later for note in record.saves]
        spoilt = spoiled(bad, tables)
        state.spoilt.update(dict.fromkeys(spoilt, 0))
        for record in later:
            for note in record.saves:
                if first_in(note.table, spoilt) is not None:
                    self._taint(record, note)
        for request in state.requests.values():
            first = first_in(request.blocks, bad)
            if first is None:
                continue
            if not state.config.sync_is_safe and request.save_bar is SaveBar.NONE:
                # vLLM may go on computing at wrong positions (vllm#49250).
                request.save_bar = SaveBar.UNTIL_REPLACED
            state.bar(request, first)

    def _taint(self, record: StepRecord, note: SaveNote) -> None:
        record.tainted[note.job_id] = None
        job = self._state.ledger.get(note.job_id)
        if job is not None:
            job.tainted = True

    def _conclude(self, record: StepRecord) -> list[SchedCommand]:
        """Send the verdict; what is not published is to be saved again."""
        record.finished = True
        for note in record.saves:
            if note.job_id not in record.tainted:
                continue
            self._taint(record, note)
            self._state.counters["saves_tainted"] += 1
            request = self._state.find(note.request_id, note.serial)
            if request is not None:
                request.saved_until = min(request.saved_until, note.first_block)
                self._state.refresh_active(request)
        if not record.saves and not any(map(self._state.ledger.get, record.jobs)):
            return []
        ranks = [self._state.ranks.get(rank) for rank in record.ranks]
        same = [rank for rank in ranks if rank.epoch == record.ranks[rank.rank]]
        return [*self._state.send_all(same, _verdict(record))]


def _verdict(record: StepRecord) -> StepVerdict:
    return StepVerdict(step=record.step, tainted=tuple(record.tainted))
