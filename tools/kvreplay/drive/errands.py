"""What a run does on its own account: it stores what the recording takes for granted, reads back
what was stored, and removes what it has left in a store that outlives it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvcommon import messages as msg
from kvcommon.ids import new_epoch
from kvreplay.drive.needs import Needs
from kvreplay.drive.outcomes import Item
from kvreplay.drive.rank import Rank, load_job, save_job
from kvreplay.drive.stage import Stage
from kvreplay.ops import key_group, key_hash, key_mark, plan_jobs
from kvworker.ask import ask_status

#: Blocks of one step that stores or checks objects.
_BATCH: Final = 64
#: A hash that no block has: a lookup for it only waits until all before it is done.
_NO_HASH: Final = bytes(32)
_REMOVED: Final = "kvferry_objects_removed_total"
_ASK_S: Final = 5.0
#: Behind the end of the leases.
_MORE_S: Final = 0.2


class Errands:
    """The run's own engines, on the stage of the recording's."""

    def __init__(self, stage: Stage) -> None:
        """Nothing is done yet."""
        self._stage = stage

    def seed(self, label: str, needs: Needs, mark: str) -> None:
        """Store what the recording takes for granted of one namespace."""
        objects = []
        for key in needs.of(mark):
            # A key that is none of ours is nothing that could be stored.
            with contextlib.suppress(ValueError):
                objects.append((key_group(key), bytes.fromhex(key_hash(key))))
        if not objects:
            return
        attach = needs.attaches[mark]
        rank = self._rank(label, attach)
        for step, (group, hashes) in enumerate(_batches(objects, attach), start=1):
            blocks = list(enumerate(hashes, start=1))
            plan = msg.StepPlan(step=step, saves=(save_job(step, group, blocks),))
            self._step(rank, label, step, plan)
            self._stage.played.num_seeded += len(blocks)
        rank.close()

    def audit(self) -> None:
        """Read back every object that is said to be stored, and compare."""
        tally = self._stage.tally
        before = tally.num_checked
        for (label, _), recorded_rank in list(self._stage.ranks.items()):
            attach = recorded_rank.last_attach
            if attach is None or not recorded_rank.stored or not self._stage.daemons[label].pid:
                continue
            rank = self._rank(label, attach)
            batches = _batches(list(recorded_rank.stored), attach)
            for step, (group, hashes) in enumerate(batches, start=1):
                blocks = list(enumerate(hashes, start=1))
                plan = msg.StepPlan(step=step, loads=(load_job(step, group, blocks),))
                num_checked = tally.num_checked
                self._step(rank, label, step, plan)
                lost = len(blocks) - (tally.num_checked - num_checked)
                if lost:
                    self._lost(lost, tally.found.get(Item("job", label, rank.name, step), ""))
            rank.close()
        self._stage.played.num_audited = tally.num_checked - before

    def remove(self, *, patient: bool) -> None:
        """Remove every object that this run has stored, by its own keys, from a store that stays.

        Reading has leased them, and Mooncake removes nothing that is leased.

        Args:
            patient: wait for the end of the leases.

        Raises:
            DriveError, ConfigError: a daemon does not answer.
        """
        stage = self._stage
        lease_s, keys = stage.options.lease_s, stage.tally.keys
        attach = next((r.last_attach for r in stage.ranks.values() if r.last_attach), None)
        if lease_s is None or not keys or attach is None:
            return
        label = next((one for one, daemon in stage.daemons.items() if daemon.pid), "")
        if not label:
            label = list(stage.daemons)[-1]
            stage.start(label)
        marks = {mark: mark for mark in sorted({key_mark(key) for key in keys})}
        rank = self._rank(label, attach, marks)
        played = stage.played
        played.num_removed = self._reset(rank, label, 1)
        waits = patient and stage.left_s > lease_s + _ASK_S
        if played.num_removed < len(keys) and waits:
            stage.wait_for(lambda: False, lease_s + _MORE_S)
            played.num_removed += self._reset(rank, label, 2)
        elif played.num_removed < len(keys):
            played.notes.append(
                f"up to {len(keys) - played.num_removed} objects of this run are left in the store "
                f"(keys kvf1-{', kvf1-'.join(marks)}): they are leased for up to {lease_s:g} s, "
                "and evicted like others when room is needed"
            )
        rank.close()

    def _reset(self, rank: Rank, label: str, number: int) -> int:
        """Have what is not leased removed; return how many objects that were."""
        endpoint = self._stage.daemons[label].endpoint
        before = ask_status(endpoint, _ASK_S).metrics.get(_REMOVED, 0.0)
        rank.scheduler(msg.ResetStore())
        group = msg.LookupGroup(group=0, block_hashes=(_NO_HASH,))
        rank.scheduler(msg.Lookup(lookup_id=number, request_id=rank.name, groups=(group,)))
        item = Item("lookup", label, rank.name, number)
        found = self._stage.tally.found
        self._stage.wait(lambda: item in found, f"{item} has no answer")
        return round(ask_status(endpoint, _ASK_S).metrics.get(_REMOVED, 0.0) - before)

    def _rank(self, label: str, attach: msg.Attach, marks: Mapping[str, str] | None = None) -> Rank:
        """A rank that is not in the recording, attached, with the namespace of one that is.

        Args:
            label: of the log whose daemon it talks to.
            attach: what it attaches as.
            marks: fingerprints that it names as its engine's.
        """
        stage, marks = self._stage, marks or {}
        rank = stage.rank(label, f"kvreplay-{len(stage.ranks)}#0")
        rank.attach(attach, new_epoch())
        stage.wait(lambda: rank.attached is not None, f"{rank.name} is not attached")
        ranks = tuple(msg.RankIdentity(rank=n, fingerprint=one) for n, one in enumerate(marks))
        rank.hello(msg.Hello(pid=0, ranks=ranks), new_epoch(), marks)
        return rank

    def _lost(self, num: int, what: str) -> None:
        """Objects that are said to be stored cannot be read back."""
        what = what or "no answer"
        text = f"{num} objects that are said to be stored cannot be read back: {what}"
        if all(daemon.pid for daemon in self._stage.daemons.values()):
            self._stage.tally.fault(text)
        else:
            # A daemon that was ended on the way has taken its memory with it.
            self._stage.played.notes.append(text)

    def _step(self, rank: Rank, label: str, number: int, plan: msg.StepPlan) -> None:
        (job,) = plan_jobs(plan)
        rank.scheduler(plan)
        rank.model(msg.StepBegun(step=number))
        if plan.saves:
            rank.scheduler(msg.StepVerdict(step=number))
        item = Item("job", label, rank.name, job.job_id)
        found = self._stage.tally.found
        self._stage.wait(lambda: item in found, f"{item} has no answer")


def _batches(
    objects: Sequence[tuple[int, bytes]], attach: msg.Attach
) -> Iterator[tuple[int, list[bytes]]]:
    """Cut objects (group, hash) into steps: of one group, and no more than it has blocks."""
    for group in attach.layout.groups:
        mine = [block_hash for number, block_hash in objects if number == group.group]
        size = max(1, min(_BATCH, group.num_blocks - 1))
        for first in range(0, len(mine), size):
            yield group.group, mine[first : first + size]
