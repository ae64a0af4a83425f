"""The breaker in front of the store: a store that cannot be reached is not asked by jobs."""

from collections.abc import Sequence

from kvcommon import reasons
from kvcommon.messages import StoreHealth, StoreState
from kvworker.core.commands import ProbeStore
from kvworker.core.engines import Engine, Engines
from kvworker.core.events import StoreProbed
from kvworker.core.kernel import Kernel
from kvworker.outcome import Outcome

_ALIVE = (Outcome.OK, Outcome.EXISTS, Outcome.MISS, Outcome.FULL, Outcome.EXPIRED)
_NS_PER_MS = 1_000_000


class Breaker:
    """Opens after several answers in a row without a sign of life; a probe closes it."""

    def __init__(self, kernel: Kernel, engines: Engines) -> None:
        self._kernel = kernel
        self._engines = engines
        self.state = StoreState.UP
        #: Op of the probe in flight, else 0.
        self.op = 0
        self._strikes = 0
        self._next_probe_ns = 0

    @property
    def down(self) -> bool:
        """No job may ask the store."""
        return self.state is StoreState.DOWN

    def note(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from an answer of the store."""
        if any(outcome in _ALIVE for outcome in outcomes):
            self._strikes = 0
        elif Outcome.DOWN in outcomes:
            self._strikes += 1
            self._kernel.count("store_unreachable")
            if self._strikes >= self._kernel.config.store_down_after and not self.down:
                self._change(StoreState.DOWN)
                self._schedule()

    def tick(self) -> None:
        """Probe a store that is down, if it is time."""
        if self.down and not self.op and self._kernel.now_ns >= self._next_probe_ns:
            self.op = self._kernel.start(ProbeStore(op=self._kernel.next_op()), self._probed)

    def tell(self, engine: Engine) -> None:
        """Tell one scheduler side how the store is."""
        reason = reasons.STORE_DOWN if self.down else ""
        self._kernel.to_scheduler(engine.key, StoreHealth(state=self.state, reason=reason))

    def _probed(self, event: StoreProbed) -> None:
        self.op = 0
        if event.state is StoreState.UP:
            self._strikes = 0
            self._change(StoreState.UP)
        else:
            self._schedule()

    def _schedule(self) -> None:
        interval_ns = self._kernel.config.probe_interval_ms * _NS_PER_MS
        self._next_probe_ns = self._kernel.now_ns + interval_ns

    def _change(self, state: StoreState) -> None:
        self.state = state
        self._kernel.count("store_changes", state=state.value)
        for engine in self._engines:
            if engine.scheduler_epoch:
                self.tell(engine)
