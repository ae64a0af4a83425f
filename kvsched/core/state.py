"""What the parts of the core share: configuration, records, ledgers and counters.

Only the parts of this package touch it, and only while an event is handled.
"""

from collections import Counter

from kvcommon.messages import SchedulerToDaemon
from kvsched.core.commands import SendToDaemon
from kvsched.core.config import CoreConfig
from kvsched.core.jobs import Ledger
from kvsched.core.planning import block_limit
from kvsched.core.ranks import Rank, Ranks
from kvsched.core.requests import PendingLoad, RequestRecord, SaveBar
from kvsched.core.steps import Steps
from kvsched.core.worth import Worth


class CoreState:
    """The state of one core. Born complete; every dict is in order of insertion."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.ranks = Ranks()
        self.ledger = Ledger()
        self.steps = Steps()
        self.worth = Worth(config.num_bytes_per_block)
        #: Requests that vLLM has and that have not ended.
        self.requests: dict[str, RequestRecord] = {}
        #: Requests that the next ``StepScheduled`` must tell about, if they are in the step.
        self.active: dict[str, None] = {}
        #: Admitted loads that no plan holds yet, by request.
        self.pending: dict[str, PendingLoad] = {}
        #: Requests that vLLM has admitted since the last step that the core was told of.
        self.admitted: dict[str, None] = {}
        #: Asynchronous loads that the model side must be told to give up.
        self.cancel: dict[int, None] = {}
        #: Blocks that may hold wrong bytes since a load failed → how many of their first tokens
        #: were written again from right ones. While a block is here, neither it nor what comes
        #: after it in a table is saved.
        self.spoilt: dict[int, int] = {}
        #: Counters by the names of ``docs/metrics.md``.
        self.counters: Counter[str] = Counter()
        self._last_serial = 0

    def add_request(
        self, request_id: str, num_tokens: int, hashes: tuple[bytes, ...], *, skip_lookup: bool
    ) -> RequestRecord:
        """Make the record of a request."""
        self._last_serial += 1
        record = RequestRecord(
            request_id=request_id,
            serial=self._last_serial,
            num_prompt_tokens=num_tokens,
            num_tokens=num_tokens,
            hashes=list(hashes),
            skip_lookup=skip_lookup,
        )
        self.requests[request_id] = record
        self.refresh_active(record)
        return record

    def find(self, request_id: str, serial: int) -> RequestRecord | None:
        """Return the record that something in flight belongs to, if it is still there."""
        record = self.requests.get(request_id)
        return record if record is not None and record.serial == serial else None

    def wants_steps(self, record: RequestRecord) -> bool:
        """Say whether the core must hear of each step of this request.

        That is while something of it is still to be saved, and until its block table is known as
        far as it might be saved again: what is appended later lies beyond and does not matter.
        """
        if record.request_id in self.pending:
            return True
        if record.save_bar is SaveBar.UNTIL_PREEMPTED or record.abandoned:
            return False
        if self.config.save_decode and self.config.can_save:
            return True
        limit = block_limit(record, self.config)
        return record.next_save < limit or len(record.blocks) < limit

    def refresh_active(self, record: RequestRecord) -> None:
        """Bring ``active`` up to date after a change of the record."""
        if self.wants_steps(record):
            self.active.setdefault(record.request_id)
        else:
            self.active.pop(record.request_id, None)

    def bar(self, record: RequestRecord, first_block: int) -> None:
        """A load of this request failed from ``first_block`` on: compute it, and save it anew."""
        if not record.barred:
            record.barred = True
            self.counters["requests_barred"] += 1
        record.roll_back(first_block)
        self.refresh_active(record)

    def send_all(self, ranks: list[Rank], body: SchedulerToDaemon) -> list[SendToDaemon]:
        """Say the same to the daemons of several ranks, unless they cannot be reached."""
        return [SendToDaemon(rank=rank.rank, body=body) for rank in ranks if not rank.lost]
