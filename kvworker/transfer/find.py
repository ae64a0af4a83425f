"""FindKeys, ResetNamespace and ProbeStore: questions to the store. The find thread's work."""

from collections.abc import Callable

from kvworker.core.commands import FindKeys, ProbeStore, ResetNamespace
from kvworker.core.events import KeysFound, StoreProbed, StoreReset
from kvworker.outcome import Outcome
from kvworker.stores.base import Store
from kvworker.transfer.job import Job


class Finder:
    """Performs the find thread's commands."""

    def __init__(self, store: Store, now_ns: Callable[[], int]) -> None:
        """Keep what the operations need."""
        self._store = store
        self._now_ns = now_ns

    def find(self, job: Job) -> KeysFound:
        """Perform ``FindKeys``."""
        command = job.command
        assert isinstance(command, FindKeys)
        outcomes = tuple(self._store.find(command.keys)) if command.keys else ()
        found = [key for key, out in zip(command.keys, outcomes, strict=True) if out is Outcome.OK]
        local = bool(found) and self._store.is_local(found)
        return KeysFound(now_ns=self._now_ns(), op=command.op, outcomes=outcomes, local=local)

    def reset(self, job: Job) -> StoreReset:
        """Perform ``ResetNamespace``."""
        command = job.command
        assert isinstance(command, ResetNamespace)
        removed = sum(self._store.remove_prefix(prefix) for prefix in command.prefixes)
        return StoreReset(now_ns=self._now_ns(), op=command.op, num_removed=removed)

    def probe(self, job: Job) -> StoreProbed:
        """Perform ``ProbeStore``."""
        command = job.command
        assert isinstance(command, ProbeStore)
        state = self._store.probe()
        return StoreProbed(now_ns=self._now_ns(), op=command.op, state=state)
