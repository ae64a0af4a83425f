"""``KVFerryConnector``: vLLM's connector interface, and nothing else.

One object per role: the SCHEDULER one drives ``SchedulerShell``, the WORKER one ``ModelSide``.
Every method is a line or two; see those two modules for what happens.
"""

# ruff: noqa: ARG002 (the parameters are those of vLLM's interface)

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvcommon.config import connector_config
from kvcommon.errors import ConfigError, HandleError
from kvcommon.ids import EngineId
from kvcommon.memory.allocator import PlainAllocation
from kvsched import compat
from kvsched.assembly import build_model_side, core_config
from kvsched.metadata import RankHandshake, StepMetadata, StepReport, read_rank_handshake
from kvsched.model_side import ModelSide
from kvsched.shell import SchedulerShell
from kvsched.stats import KVFerryPromMetrics, KVFerryStats, StatsSource

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvferry.connector")

#: The one KV cache group that is served (``compat.served_group``).
_GROUP = 0


@contextlib.contextmanager
def _said_in_one_line() -> Iterator[None]:
    """Say why an engine cannot start where vLLM buries it in the tracebacks of three processes."""
    try:
        yield
    except (ConfigError, HandleError) as error:
        logger.error("kvferry: vLLM cannot start like this: %s", error)  # noqa: TRY400
        raise


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores vLLM's KV blocks in a Mooncake Store from outside the model process."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig | None" = None,
    ) -> None:
        """Check the configuration.

        Raises:
            ConfigError: an option or the model is not what kvferry serves; says what to change.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        with _said_in_one_line():
            extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
            self._config = connector_config(extra_config)
            compat.check_supported(vllm_config)
            self._group = compat.served_group(kv_cache_config)
        self._vllm = vllm_config
        self._engine = EngineId(vllm_config.kv_transfer_config.engine_id)
        self._shell: SchedulerShell | None = None
        self._model: ModelSide | None = None
        self._handshake: RankHandshake | None = None
        self._stats = StatsSource()
        self._allocation: PlainAllocation | None = None
        if role is KVConnectorRole.WORKER and self._config.mode == "daemon":
            # The KV cache is allocated next.
            self._allocation = PlainAllocation()
        if role is KVConnectorRole.SCHEDULER:
            core = core_config(self._config, vllm_config, self._group)
            with _said_in_one_line():
                self._shell = SchedulerShell(self._config, self._engine, core)

    @property
    def scheduler(self) -> SchedulerShell:
        """The scheduler half; only in the SCHEDULER role."""
        assert self._shell is not None, "not the scheduler role"
        return self._shell

    # -- worker role ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Export the KV cache and begin to attach; a daemon need not be there yet."""
        try:
            with _said_in_one_line():
                self._model, self._handshake = build_model_side(
                    self._config, self._vllm, self._engine, self._group, kv_caches
                )
        finally:
            if self._allocation is not None:
                self._allocation.close()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler side where this rank's daemon is."""
        return self._handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._model is not None and isinstance(connector_metadata, StepMetadata):
            self._model.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """End a step."""
        if self._model is not None:
            self._model.clear()
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: object) -> None:
        """Nothing is started here: the daemon has the plan. See ``ModelSide.start_load``."""
        if self._model is not None:
            self._model.start_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until the layer's blocks may be read."""
        if self._model is not None:
            self._model.wait_for_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: object,
    ) -> None:
        """Say that the layer is computed."""
        if self._model is not None:
            self._model.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Say that every layer is computed; never waits."""
        if self._model is not None:
            self._model.step_computed()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report asynchronous loads that ended; saves never delay a request's end."""
        if self._model is None:
            return None, None
        return None, self._model.finished_loads() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report blocks that hold wrong bytes."""
        return self._model.failed_blocks() if self._model is not None else set()

    def build_connector_worker_meta(self) -> StepReport | None:
        """Tell the scheduler side that the step has run, where it had jobs."""
        metadata = self._connector_metadata
        if self._model is None or not isinstance(metadata, StepMetadata):
            return None
        return self._model.report(metadata.step)

    # -- scheduler role ------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Take vLLM's block pool, to hold references on blocks."""
        self.scheduler.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the handshake of an engine without pipeline stages."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): m for rank, m in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the handshake: every rank's daemon and what it stores."""
        infos = [read_rank_handshake(m) for m in metadata.values() if isinstance(m, RankHandshake)]
        wanted = compat.num_ranks(self._vllm)
        if sorted(info.rank for info in infos) != list(range(wanted)):
            # A hit needs the part of every rank (rule 8), and we would not know them all.
            logger.error(
                "kvferry: vLLM's handshake named ranks %s, and this engine has %d; it serves "
                "without the cache. MultiConnector passes on one child's handshake only: name "
                "KVFerryConnector first",
                sorted(info.rank for info in infos),
                wanted,
            )
            return
        self.scheduler.ranks_known(infos)

    def on_new_request(self, request: "Request") -> None:
        """Look the request up early."""
        self.scheduler.request_added(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens the store has beyond those computed; None: ask again."""
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan the load of an admitted request."""
        self.scheduler.allocated(request, blocks.get_block_ids()[_GROUP], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Plan the step and publish the plan."""
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Hear what became of a step."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self.scheduler.step_finished(report.step, connector_output.invalid_block_ids or ())

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the end of a request: references are held per job (rule 1)."""
        self.scheduler.request_finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Keep stepping while jobs are open."""
        return self._shell is not None and self._shell.has_pending

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may lose what it likes."""
        return False

    def take_events(self) -> Iterable[Any]:
        """No KV events of our own yet."""
        return ()

    def reset_cache(self) -> bool | None:
        """Forget what this engine's namespaces have stored."""
        return self.scheduler.reset()

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """Counters that moved, on the scheduler side."""
        return self._stats.take(self._shell.counters) if self._shell is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        """Rebuild stats in the front end."""
        return KVFerryStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryPromMetrics:
        """Our counters in vLLM's ``/metrics``."""
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- both ----------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks do not run inside a full graph.

        Where vLLM asks, it asks before it starts any process: a wrong option is best refused here.
        """
        connector_config(extra_config)
        return True

    def shutdown(self) -> None:
        """End conversations; daemons notice a killed process by themselves."""
        if self._model is not None:
            self._model.close()
            self._model = None
        if self._shell is not None:
            self._shell.close()
