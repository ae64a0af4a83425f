"""Attaching and letting go of a rank's memory.

The memory of one incarnation is unmapped before that of the next is mapped, so an engine has at
most one mapping, and a command never means another one than it was made for.
"""

from functools import partial

from kvcommon import reasons
from kvcommon.ids import Fingerprint
from kvcommon.keys import Namespace, differences, fingerprint
from kvcommon.messages import Attach, Attached, Refused
from kvworker.core.commands import MapEngine, UnmapEngine
from kvworker.core.engines import Engine
from kvworker.core.events import EngineMapped, EngineUnmapped
from kvworker.core.kernel import Kernel
from kvworker.core.loads import Loads
from kvworker.core.saves import Saves
from kvworker.core.schedulers import welcome
from kvworker.core.states import MapState


class Attachments:
    """Maps and unmaps."""

    def __init__(self, kernel: Kernel, saves: Saves, loads: Loads) -> None:
        self._kernel = kernel
        self._saves = saves
        self._loads = loads
        #: Namespaces served, the last used one last.
        self._namespaces: dict[Fingerprint, Namespace] = {}

    def attach(self, engine: Engine, epoch: int, attach: Attach) -> None:
        """Take up a model side; what an earlier one of the same rank has open ends first."""
        refusal = self._check(attach)
        if refusal is not None:
            self._kernel.count("attaches", outcome="refused")
            self._kernel.to_model(engine.key, refusal)
            return
        if epoch == engine.model_epoch and attach in (engine.attach, engine.waiting):
            if engine.attached:
                self._welcome_model(engine, ())
            return
        engine.model_epoch = epoch
        engine.waiting = attach
        engine.incarnation += 1
        engine.steps_epoch = 0
        engine.progress.reset()
        if engine.state is MapState.ABSENT:
            self._map(engine)
        else:
            self._let_go(engine, reasons.ENGINE_LOST)

    def lost(self, engine: Engine, reason: str) -> None:
        """The model side is gone, or leaves: end its jobs and unmap its memory."""
        engine.model_epoch = 0
        engine.waiting = None
        self._let_go(engine, reason)

    def _check(self, attach: Attach) -> Refused | None:
        """Say why this daemon cannot serve it, if it cannot."""
        ours = self._kernel.config.device
        if attach.device != ours:
            return Refused(
                reason=f"this daemon serves {ours}, not {attach.device}",
                remedy=f"start a daemon for {attach.device}, or name its endpoint in `daemons`",
            )
        groups = attach.layout.groups
        numbers = {group.group for group in groups}
        hollow = [g.group for g in groups if not g.layers or not g.object_bytes or g.num_blocks < 1]
        if not groups or hollow or len(numbers) < len(groups):
            return Refused(
                reason="the layout has no group, two groups of one number, or an empty group",
                remedy="this is a bug of the model side: report it with its event log",
            )
        return None

    def _map(self, engine: Engine) -> None:
        """Map the attach that waits."""
        assert engine.waiting is not None
        engine.attach, engine.waiting = engine.waiting, None
        engine.mark = fingerprint(engine.attach.namespace)
        engine.move(MapState.MAPPING)
        command = MapEngine(op=self._kernel.next_op(), engine=engine.key, attach=engine.attach)
        engine.op = self._kernel.start(command, partial(self._mapped, engine))

    def _mapped(self, engine: Engine, event: EngineMapped) -> None:
        engine.op = 0
        wanted = engine.attach is not None
        if event.error:
            engine.attach = None
            engine.move(MapState.ABSENT)
            if engine.waiting is not None:
                self._map(engine)
            elif wanted:
                engine.model_epoch = 0
                self._kernel.count("attaches", outcome="failed")
                refusal = Refused(reason=event.error, remedy=event.remedy)
                self._kernel.to_model(engine.key, refusal)
        elif not wanted:
            self._unmap(engine)
        else:
            engine.move(MapState.MAPPED)
            engine.capabilities = event.capabilities
            self._kernel.count("attaches", outcome="mapped")
            self._welcome_model(engine, self._introduce(engine))
            if engine.scheduler_epoch:
                welcome(self._kernel, engine)

    def _welcome_model(self, engine: Engine, lines: tuple[str, ...]) -> None:
        """Tell the model side that it is attached."""
        body = Attached(
            pid=self._kernel.config.pid, capabilities=engine.capabilities, differences=lines
        )
        self._kernel.to_model(engine.key, body)

    def _introduce(self, engine: Engine) -> tuple[str, ...]:
        """Remember the namespace; say how a new one differs from the nearest that was served."""
        assert engine.attach is not None
        ours = engine.attach.namespace
        known = self._namespaces.pop(engine.mark, None)
        lines: tuple[str, ...] = ()
        if known is None and self._namespaces:
            every = (differences(ours, theirs) for theirs in self._namespaces.values())
            lines = min(every, key=len)
        self._namespaces[engine.mark] = ours
        if len(self._namespaces) > self._kernel.config.max_namespaces:
            del self._namespaces[next(iter(self._namespaces))]
        return lines

    def _let_go(self, engine: Engine, reason: str) -> None:
        """The memory that is mapped, or being mapped, is not wanted any more."""
        was_mapped = engine.attached
        engine.attach = None
        if was_mapped:
            engine.move(MapState.UNMAPPING)
        for save_batch in self._saves.of(engine):
            self._saves.give_up(save_batch, tuple(save_batch.jobs), reason)
        for load_batch in self._loads.of(engine):
            self._loads.give_up(load_batch, tuple(load_batch.jobs), reason)
        if was_mapped:
            self._start_unmapping(engine)
            if engine.scheduler_epoch:
                welcome(self._kernel, engine)

    def _unmap(self, engine: Engine) -> None:
        engine.move(MapState.UNMAPPING)
        self._start_unmapping(engine)

    def _start_unmapping(self, engine: Engine) -> None:
        """What is in flight has been cancelled; the executor waits for what still runs."""
        command = UnmapEngine(op=self._kernel.next_op(), engine=engine.key)
        engine.op = self._kernel.start(command, partial(self._unmapped, engine))

    def _unmapped(self, engine: Engine, _event: EngineUnmapped) -> None:
        engine.op = 0
        engine.move(MapState.ABSENT)
        if engine.waiting is not None:
            self._map(engine)
