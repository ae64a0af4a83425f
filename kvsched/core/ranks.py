"""The ranks of the engine and what is known about the daemon of each."""

import msgspec

from kvcommon.reasons import DAEMON_LOST, DAEMON_NOT_ATTACHED, STORE_DOWN


class Rank(msgspec.Struct, kw_only=True):
    """One rank's daemon, as seen from the scheduler side."""

    rank: int
    #: Incarnation of the daemon; 0: none yet, or its death is known.
    epoch: int = 0
    #: It has mapped the model side's memory.
    attached: bool = False
    #: It cannot be reached (true until its first ``Welcome``).
    lost: bool = True
    store_up: bool = True
    #: It has not been told to forget what is stored: it could not be reached.
    owes_reset: bool = False
    #: Step → time of the plans that it has not acknowledged.
    acks: dict[int, int] = {}
    #: An acknowledgement is overdue.
    late: bool = False
    #: It has said nothing for so long.
    silent_ms: int = 0
    #: It is to be killed, and its death is not known yet.
    fenced: bool = False
    #: It cannot be killed: the blocks of its jobs stay referenced until it is heard of again.
    quarantined: bool = False

    @property
    def serving(self) -> bool:
        """Plans and lookups may be sent."""
        return self.attached and not (self.lost or self.late or self.fenced)

    def heard(self) -> None:
        """It is alive, or another one is in its place."""
        self.silent_ms = 0
        self.fenced = self.quarantined = False


class Ranks:
    """All ranks, ascending."""

    def __init__(self) -> None:
        self._ranks: dict[int, Rank] = {}
        #: The ranks that vLLM's handshake named; empty until then.
        self.named: tuple[int, ...] = ()

    def get(self, rank: int) -> Rank:
        """Return the record of a rank, made if it is new."""
        if rank not in self._ranks:
            self._ranks[rank] = Rank(rank=rank)
            self._ranks = dict(sorted(self._ranks.items()))
        return self._ranks[rank]

    def all(self) -> list[Rank]:
        """Return the named ranks, ascending."""
        return [self.get(rank) for rank in self.named]

    @property
    def serving(self) -> bool:
        """Every rank is there (rule 8: a hit needs each one's part)."""
        return bool(self.named) and all(rank.serving for rank in self.all())

    @property
    def store_up(self) -> bool:
        """The store of every rank is usable."""
        return all(rank.store_up for rank in self.all())

    @property
    def lookup_rank(self) -> int:
        """The one rank whose daemon answers lookups."""
        return self.named[0] if self.named else 0

    def obstacle(self) -> str:
        """Say in a reason word why nothing can be loaded now; empty if it can."""
        if not self.named:
            return DAEMON_NOT_ATTACHED
        ranks = self.all()
        if any(rank.late or (rank.lost and rank.epoch) for rank in ranks):
            return DAEMON_LOST
        if not self.serving:
            return DAEMON_NOT_ATTACHED
        return "" if self.store_up else STORE_DOWN

    def sent_plan(self, rank: int, step: int, now_ns: int) -> None:
        """Expect an acknowledgement."""
        self.get(rank).acks[step] = now_ns

    def acked(self, rank: int, step: int, overdue_before_ns: int) -> None:
        """An acknowledgement arrived; it stands for all earlier steps too."""
        record = self.get(rank)
        record.acks = {s: at for s, at in record.acks.items() if s > step}
        record.late = any(at < overdue_before_ns for at in record.acks.values())

    def find_late(self, overdue_before_ns: int) -> int:
        """Mark the ranks that owe an acknowledgement; return how many became so now."""
        count = 0
        for rank in self._ranks.values():
            overdue = any(at < overdue_before_ns for at in rank.acks.values())
            if overdue and not rank.late and not rank.lost:
                rank.late = True
                count += 1
        return count
