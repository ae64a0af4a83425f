"""The model side of one rank: the real links, and what ``ModelSide`` and ``Attachment`` do.

Those two wait; here the world decides how long a wait lasts.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from kvcommon.ids import EngineId, Epoch
from kvcommon.messages import (
    Attached,
    CancelJobs,
    Heartbeat,
    LayersComputed,
    Message,
    Refused,
    StepBegun,
)
from kvsched.core.commands import ModelLoad, TellModel
from kvsched.link import DaemonLink, LinkChange
from kvsched.pending import AsyncLoads, DataLink
from tests.pair.network import FakeContext
from tests.pair.store import Memory
from tests.support.playbook import NAMESPACE, NUM_LAYERS, attach

if TYPE_CHECKING:
    from tests.pair.world import World

ENGINE = EngineId("llm")
_HEARTBEAT_NS = 1_000_000_000
LOAD_TIMEOUT_NS = 5_000_000_000


def namespace(rank: int) -> Any:
    return msgspec.structs.replace(NAMESPACE, rank=(0, rank))


class Model:
    """One rank of one engine process."""

    def __init__(self, world: "World", rank: int, pid: int, epoch: Epoch) -> None:
        self._world = world
        self._rank = rank
        self._epoch = epoch
        self.address, self.memory = world.new_memory()
        self._attach = msgspec.structs.replace(
            attach(device=f"cpu:{rank}", namespace=namespace(rank), address=self.address),
            pid=pid,
            lease_ms=10_000,
        )
        context: Any = FakeContext(world.network)
        endpoint = f"ipc://{rank}"
        self.control = DaemonLink(context, endpoint, rank, "model")
        self._data_link = DaemonLink(context, endpoint, rank, "data")
        self._data = DataLink(self._data_link, ENGINE, epoch)
        self._async = AsyncLoads(LOAD_TIMEOUT_NS)
        self.attached = False
        self._generation = 0
        self._said_ns = 0
        self._reopen = True
        self._connected = False
        #: Attachment that the step's loads were planned under.
        self._planned_under = 0
        self._begun_ns = 0
        self._tell: TellModel | None = None
        self.loads: tuple[ModelLoad, ...] = ()
        self.failed: set[int] = set()

    @property
    def serving(self) -> int:
        """``Attachment.serving``."""
        return self._generation if self.attached else 0

    @property
    def may_wait(self) -> bool:
        """Whoever was to do the step's loads is still there, and in time."""
        in_time = self._world.now_ns - self._begun_ns < LOAD_TIMEOUT_NS
        return in_time and self._planned_under != 0 and self._planned_under == self.serving

    # The attach thread.

    def poll(self) -> None:
        """One turn of ``Attachment``."""
        now_ns = self._world.now_ns
        if self._reopen:
            self._reopen = self.attached = self._connected = False
            self.control.open(ENGINE, self._epoch)
            self.control.send(self._attach)
            self._said_ns = now_ns
        if now_ns - self._said_ns >= _HEARTBEAT_NS:
            self._said_ns = now_ns
            if self._connected:
                self.control.send(Heartbeat())
        for change in self.control.changes():
            self._connected = change is LinkChange.CONNECTED
            if change is LinkChange.DISCONNECTED:
                self._reopen, self.attached = True, False
        while (message := self.control.receive()) is not None:
            if isinstance(message, Attached):
                self._generation += 1
                self.attached = True
            elif isinstance(message, LinkChange) or (
                isinstance(message, Refused) and message.resync
            ):
                self._reopen, self.attached = True, False
            assert not isinstance(message, Refused) or message.resync, message

    # The thread that runs the model.

    def _say(self, message: Message) -> None:
        self._data.send(message, self.serving)

    def begin(self, step: int, tell: TellModel | None) -> None:
        """``bind_connector_metadata``."""
        self.memory.begun = step
        self._tell = tell
        self._planned_under = self.serving
        self._begun_ns = self._world.now_ns
        self.loads = ()
        if tell is None:
            return
        self.loads = tuple(load for load in tell.loads if load.layerwise)
        later = (load for load in tell.loads if not load.layerwise)
        self._async.add(later, self._world.now_ns, self.serving)
        if tell.cancel:
            self._say(CancelJobs(step=tell.step, job_ids=tell.cancel))
        if tell.loads or tell.saves:
            self._say(StepBegun(step=tell.step))

    def is_loaded(self, layer: int) -> bool:
        """``wait_for_layer_load`` would return."""
        if not self.loads or self._tell is None:
            return True
        return self.memory.page.get(self._tell.step, (0, False))[0] > layer

    def give_up(self) -> None:
        """The deadline is over, or no daemon is attached."""
        assert self._tell is not None
        self.memory.given_up.add(self._tell.step)
        self._say(CancelJobs(step=self._tell.step, job_ids=tuple(j.job_id for j in self.loads)))
        for load in self.loads:
            self.failed.update(load.block_ids)
        self.loads = ()

    def layer_computed(self, layer: int) -> None:
        """``save_kv_layer``."""
        if self._tell is not None and self._tell.saves:
            self._say(LayersComputed(step=self._tell.step, num_layers=layer + 1))

    def collect(self) -> tuple[set[str], set[int]]:
        """``get_finished`` and ``get_block_ids_with_load_errors``."""
        requests: set[str] = set()
        if self._async:
            requests, failed = self._async.collect(self._data, self._world.now_ns, self.serving)
            self.failed |= failed
        if self.loads and self._tell is not None and self.memory.page[self._tell.step][1]:
            self._data.drain()
            for load in self.loads:
                end = self._data.take(load.job_id)
                self.failed.update(load.block_ids if end is None else end.failed_blocks)
        self.loads = ()
        failed, self.failed = self.failed, set()
        return requests, failed

    def close(self) -> None:
        self.control.close()
        self._data.close()


__all__ = ["ENGINE", "NUM_LAYERS", "Memory", "Model", "namespace"]
