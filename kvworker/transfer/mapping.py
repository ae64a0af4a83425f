"""MapEngine and UnmapEngine: an engine's memory comes and goes. The map thread's work."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvcommon.errors import HandleError
from kvcommon.memory.page import ProgressPage, expected_answer
from kvcommon.messages import EVENTS, Attach
from kvworker.core.commands import MapEngine, UnmapEngine
from kvworker.core.events import EngineMapped, EngineUnmapped
from kvworker.devices.base import Device, Mapping
from kvworker.devices.pieces import check_layout
from kvworker.stores.base import Store
from kvworker.transfer.engine_memory import EngineMemory
from kvworker.transfer.job import Job
from kvworker.transfer.staging import Staging

_log = logging.getLogger("kvferry.worker")


class EngineMaps:
    """The mapped engines. Only ``get`` may be called outside the map thread."""

    def __init__(
        self,
        device: Device,
        store: Store,
        now_ns: Callable[[], int],
        staging: Sequence[Staging],
        *,
        try_direct: bool = False,
    ) -> None:
        """Keep what attaching needs.

        ``staging`` is registered with the store at the first attach; none if the device is direct.
        ``try_direct``: register the KV cache itself where the store may be able to reach it.
        """
        self._try_direct = try_direct
        self._device = device
        self._store = store
        self._now_ns = now_ns
        self._staging = staging
        self._engines: dict[str, EngineMemory] = {}

    def get(self, engine: str) -> EngineMemory | None:
        """Return the memory of an engine that is mapped now."""
        return self._engines.get(engine)

    def map(self, job: Job) -> EngineMapped:
        """Perform ``MapEngine``. An earlier attach of the same rank is unmapped first."""
        command = job.command
        assert isinstance(command, MapEngine)
        self._drop(command.engine)
        try:
            memory = self._attach(command.attach)
        except HandleError as error:
            return EngineMapped(
                now_ns=self._now_ns(),
                op=command.op,
                engine=command.engine,
                error=error.cause,
                remedy=error.remedy,
            )
        self._engines[command.engine] = memory
        copying = "direct" if memory.direct else "staging"
        capabilities = (copying, EVENTS) if memory.events else (copying,)
        return EngineMapped(
            now_ns=self._now_ns(),
            op=command.op,
            engine=command.engine,
            capabilities=capabilities,
        )

    def unmap(self, job: Job) -> EngineUnmapped:
        """Perform ``UnmapEngine``: wait for the operations inside, then let go."""
        command = job.command
        assert isinstance(command, UnmapEngine)
        self._drop(command.engine)
        return EngineUnmapped(now_ns=self._now_ns(), op=command.op, engine=command.engine)

    def close(self) -> None:
        """Unmap every engine. After the map thread has ended."""
        for engine in list(self._engines):
            self._drop(engine)

    def _drop(self, engine: str) -> None:
        memory = self._engines.pop(engine, None)
        if memory is not None:
            memory.close()

    def _attach(self, attach: Attach) -> EngineMemory:
        """Map, check and register. Raises ``HandleError``, and then all of it is undone."""
        with ExitStack() as undo:
            page = ProgressPage.open(attach.page)
            undo.callback(page.close)
            # The memory is let go of before this is said; whoever owns it may wait for that.
            undo.callback(page.answer, 0)
            mapping = self._device.map(attach.storages)
            undo.callback(mapping.close)
            check_layout(attach.layout, mapping.storages)
            events = attach.proof is not None and self._device.prove(attach.proof)
            for buffer in self._staging:
                buffer.register(self._store)
            direct = self._device.direct or (self._try_direct and self._store.device_memory)
            if direct and not self._register(mapping, undo):
                if self._device.direct:
                    cause = f"the store {self._store.name} refuses memory of the KV cache"
                    remedy = "see the daemon's log for what the store's client says"
                    raise HandleError(cause, remedy)
                direct = False
                _log.warning("the store cannot reach the KV cache itself: staging memory is used")
            for buffer in self._staging:
                buffer.check_fits(attach.layout)
            # The other half of the read-back check: the model side compares the answer.
            page.answer(expected_answer(page.nonce))
            return EngineMemory(
                mapping, attach.layout, page, undo.pop_all(), events=events, direct=direct
            )

    def _register(self, mapping: Mapping, undo: ExitStack) -> bool:
        """Register all of a mapping, to be undone by ``undo``; or nothing of it, and say False."""
        with ExitStack() as attempt:
            for region in self._device.regions(mapping):
                if not self._store.register(region.address, region.size, self._device.location):
                    return False
                attempt.callback(self._store.unregister, region.address)
            undo.push(attempt.pop_all())
        return True
