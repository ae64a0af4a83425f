"""A scheduler side's shell before a fake daemon, with vLLM's own block pool."""

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from kvcommon.config import ConnectorConfig
from kvcommon.ids import EngineId
from kvcommon.messages import GroupHit, Hello, Lookup, LookupResult
from kvsched.core.core import CoreConfig
from kvsched.ranks import RankInfo
from kvsched.shell import SchedulerShell
from tests.support.fakedaemon import FakeDaemon, until

BLOCK = 16
NUM_BLOCKS = 64
LONG_MS = 20_000.0


class ShellWorld:
    """A shell whose daemon has welcomed it, with vLLM's own block pool."""

    def __init__(self, daemon: FakeDaemon, *, load: str = "layerwise", **options: Any) -> None:
        self.daemon = daemon
        config = ConnectorConfig(**{"lookup_wait_ms": LONG_MS, "validate": True, **options})
        core = CoreConfig(
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            load=load,  # type: ignore[arg-type]
            lookup_timeout_ms=LONG_MS,
            validate=True,
        )
        self.shell = SchedulerShell(config, EngineId("engine"), core)
        self.pool = BlockPool(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.shell.bind_block_pool(self.pool)

    def greet(self, event_log: str = "") -> None:
        info = RankInfo(
            rank=0,
            endpoint=self.daemon.endpoint,
            device="cpu:0",
            fingerprint="f",
            object_bytes=64,
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
        )
        self.shell.ranks_known([info])
        self.daemon.hear(Hello)
        self.daemon.welcome(event_log=event_log)
        self.poll_until(lambda: self.shell._core.serving)

    def poll_until(self, condition: Any) -> None:
        def met() -> bool:
            self.shell._poll()
            return bool(condition())

        ranks = self.shell._ranks
        assert ranks is not None
        until(met, lambda timeout_ms: ranks.wait(0, timeout_ms))

    def answer(self, num_blocks: int) -> None:
        """Answer the next lookup."""
        lookup = self.daemon.hear(Lookup)
        hits = (GroupHit(group=0, num_blocks=num_blocks),)
        self.daemon.say("scheduler", LookupResult(lookup_id=lookup.lookup_id, hits=hits))

    def admit(self, request: Any, num_blocks: int) -> tuple[list[Any], Any]:
        """Look a request up, find everything but its last block, and admit it with that."""
        self.shell.request_added(request)
        self.answer(num_blocks - 1)
        matched, _ = self.shell.match(request, 0)
        assert matched == (num_blocks - 1) * BLOCK
        blocks = self.pool.get_new_blocks(num_blocks)
        ids = [block.block_id for block in blocks]
        self.shell.allocated(request, ids, matched)
        return blocks, scheduled(request, ids, matched)


def request(name: str, num_blocks: int = 3) -> Any:
    return SimpleNamespace(
        request_id=name,
        num_tokens=num_blocks * BLOCK,
        block_hashes=[f"{name}{index}".encode() for index in range(num_blocks)],
    )


def scheduled(request: Any, ids: list[int], computed: int) -> SchedulerOutput:
    """The step in which a request is computed to its end."""
    output = SchedulerOutput.make_empty()
    fresh = NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=[],
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=(ids,),
        num_computed_tokens=computed,
        lora_request=None,
    )
    output.scheduled_new_reqs = [fresh]
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.num_scheduled_tokens = {request.request_id: request.num_tokens - computed}
    return output


def nothing() -> SchedulerOutput:
    return SchedulerOutput.make_empty()
