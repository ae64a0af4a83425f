"""The model side: what happens inside a vLLM worker, on vLLM's own thread.

Three cheap things: export the KV memory once, mark progress per layer, wait (bounded) for layers.
No transfer code runs here, and no hook raises for a daemon's fault.

State of a step is set up in ``bind`` and dropped in ``clear``; nothing depends on where vLLM calls
``start_load_kv`` (since 0.29 it may come after the forward pass). A step without jobs costs one
attribute test per hook, sends nothing and makes no system call.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvcommon.memory.page import ProgressPage
from kvcommon.messages import CancelJobs, LayersComputed, Message, StepBegun
from kvsched.attachment import Attachment
from kvsched.core.commands import ModelLoad, TellModel
from kvsched.hooks import HookTable
from kvsched.metadata import StepMetadata, StepReport, read_step_metadata
from kvsched.pending import AsyncLoads, DataLink

logger = logging.getLogger("vllm.kvferry.model")

#: While waiting for a layer: first look again at once, then give the processor away.
_SPINS = 200
_NAP_S = 20e-6
#: After the page has said that blocks failed, how long to wait for the message that names them.
_FAILURE_REPORT_MS = 500.0


class ModelSide:
    """The worker half of the connector. Owned by the thread that runs the model."""

    def __init__(
        self,
        attachment: Attachment,
        page: ProgressPage,
        data: DataLink,
        layer_names: Sequence[str],
        load_timeout_ms: float,
        *,
        hooks_wait: bool = True,
    ) -> None:
        """Take what start-up made.

        Args:
            attachment: Keeps the daemon informed of our memory, in a thread of its own.
            page: The progress page, ours.
            data: Conversation about steps, used by this thread alone.
            layer_names: The layer table.
            load_timeout_ms: How long a load may take before its blocks are given up.
            hooks_wait: Every batch waits at its layers' hooks; else it is waited for before.
        """
        self._hooks_wait = hooks_wait
        self._attachment = attachment
        self._page = page
        self._data = data
        self._num_layers = len(layer_names)
        self._hooks = HookTable(layer_names)
        self._timeout_ns = int(load_timeout_ms * 1e6)
        self._async = AsyncLoads(self._timeout_ns)
        self._tell: TellModel | None = None
        #: Layerwise loads of this step; empty: nothing to wait for.
        self._loads: tuple[ModelLoad, ...] = ()
        self._deadline_ns = 0
        #: The attachment that the step's loads were planned under; 0: nobody does them.
        self._serving = 0
        self._num_loaded = 0
        self._saving = False
        self._num_computed = 0
        self._failed: set[int] = set()
        self._reporting = False

    def bind(self, metadata: StepMetadata) -> None:
        """``bind_connector_metadata``: the step begins; earlier steps no longer touch a block."""
        if not metadata.payload:
            return
        tell = self._tell = read_step_metadata(metadata)
        self._loads = tuple(load for load in tell.loads if load.layerwise)
        now_ns = time.monotonic_ns()
        self._deadline_ns = now_ns + self._timeout_ns
        self._num_loaded = self._num_computed = 0
        self._saving = tell.saves
        self._reporting = True
        self._serving = 0 if metadata.lost else self._attachment.serving
        later = (load for load in tell.loads if not load.layerwise)
        self._async.add(later, now_ns, self._serving)
        if self._loads:
            # Ends of layerwise loads are read only after a failure; here what came is taken in.
            self._data.drain()
        if metadata.lost:
            return
        if tell.cancel:
            self._say(CancelJobs(step=tell.step, job_ids=tell.cancel))
        if tell.loads or tell.saves:
            self._say(StepBegun(step=tell.step))
        if self._loads and not self._hooks_wait:
            self._wait_until(self._num_layers)

    def start_load(self) -> None:
        """``start_load_kv``: a model none of whose layers calls a hook is waited for here."""
        if self._loads and self._hooks.silent:
            self._wait_until(self._num_layers)

    def wait_for_layer(self, name: str) -> None:
        """``wait_for_layer_load``: return when the layer's blocks may be read."""
        if not self._hooks.learned:
            self._hooks.saw(name)
        if self._loads:
            needed = self._hooks.needed_for(name)
            if needed > self._num_loaded:
                self._wait_until(needed)

    def layer_computed(self, name: str) -> None:
        """``save_kv_layer``: the layer's blocks are written (queued, on a device)."""
        if self._saving and (count := self._hooks.computed(name, self._num_computed)):
            self._num_computed = count
            self._say_computed()

    def step_computed(self) -> None:
        """``wait_for_save``: every layer is written, those without a hook too. Never waits."""
        if self._saving and self._num_computed < self._num_layers:
            self._num_computed = self._num_layers
            self._say_computed()

    def finished_loads(self) -> set[str]:
        """Requests whose asynchronous load has ended since the last call, each exactly once."""
        if not self._async:
            return set()
        requests, failed = self._async.collect(
            self._data, time.monotonic_ns(), self._attachment.serving
        )
        if failed:
            self._failed |= failed
            self._reporting = True
        return requests

    def failed_blocks(self) -> set[int]:
        """Blocks that hold wrong bytes. Waits for the layerwise loads of the step first."""
        if self._loads:
            unread = self._num_loaded == 0
            self._wait_until(self._num_layers)
            if unread:
                self._overtaken()
            self._collect_failures()
            self._loads = ()
        failed, self._failed = self._failed, set()
        return failed

    def report(self, step: int) -> StepReport | None:
        """``build_connector_worker_meta``: the step has run, if anybody needs to know."""
        return StepReport(step) if self._reporting else None

    def clear(self) -> None:
        """``clear_connector_metadata``: the step is over."""
        self._hooks.step_over()
        self._tell = None
        self._loads = ()
        self._saving = False
        self._reporting = False

    def close(self) -> None:
        """Tell the daemon to let go of our memory, and stop."""
        self._data.close()
        self._attachment.close()
        self._page.close()

    def describe(self) -> Mapping[str, Any]:
        """For tests and logs: what is attached."""
        return {"attached": self._attachment.attached, "layers": self._num_layers}

    # -- inside --------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        if not self._data.send(message, self._attachment.serving):
            logger.debug("kvferry: the daemon's queue is full or closed; dropped %s", message)

    def _say_computed(self) -> None:
        if self._tell is not None:
            self._say(LayersComputed(step=self._tell.step, num_layers=self._num_computed))

    def _wait_until(self, needed: int) -> None:
        """Wait until ``needed`` layers are loaded, or the deadline has passed, or no daemon."""
        if self._tell is None:
            return
        step, page = self._tell.step, self._page
        spins = 0
        while True:
            loaded, _ = page.read(step)
            if loaded >= needed:
                self._num_loaded = loaded
                return
            spins += 1
            if spins > _SPINS:
                alive = self._serving and self._serving == self._attachment.serving
                if not alive or time.monotonic_ns() > self._deadline_ns:
                    self._give_up(step, loaded, "load_timeout_ms is over" if alive else "no daemon")
                    return
                time.sleep(_NAP_S)

    def _give_up(self, step: int, loaded: int, reason: str) -> None:
        """Count every block of the step's loads as failed; wait for nothing more."""
        logger.warning(
            "kvferry: step %d: %d of %d layers loaded, and %s; its blocks are recomputed or "
            "failed as kv_load_failure_policy says",
            step,
            loaded,
            self._num_layers,
            reason,
        )
        # The daemon stops between two layers: what it still wrote would meet what is recomputed.
        if self._serving:
            self._say(CancelJobs(step=step, job_ids=tuple(load.job_id for load in self._loads)))
        self._fail_loads()
        self._num_loaded = self._num_layers

    def _overtaken(self) -> None:
        """No layer of the forward pass waited: it may have read blocks before they were loaded."""
        if not self._loads:
            return
        logger.warning(
            "kvferry: no layer called vLLM's hooks in a step with loads; its blocks count as "
            "failed, and from now on loads are waited for before the forward pass"
        )
        self._hooks.distrust()
        self._fail_loads()

    def _fail_loads(self) -> None:
        for load in self._loads:
            self._failed.update(load.block_ids)
        self._loads = ()

    def _collect_failures(self) -> None:
        if not self._loads or self._tell is None or not self._page.read(self._tell.step)[1]:
            return
        ends = self._data.wait_for((load.job_id for load in self._loads), _FAILURE_REPORT_MS)
        for load in self._loads:
            end = ends.get(load.job_id)
            self._failed.update(load.block_ids if end is None else end.failed_blocks)
