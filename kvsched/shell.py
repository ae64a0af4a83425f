"""The scheduler side's shell: vLLM's calls become events, commands become deeds.

Threading: vLLM's scheduler thread alone; no thread of our own.

Fault rule: a bug of ours must never take the engine down. ``guarded`` wraps every entry: on an
exception the shell logs it with the place of the event log, switches itself off, and from then on
answers "no hit" and plans nothing. Blocks that it held stay held, because daemons may still touch
them.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import zmq

from kvcommon.config import ConnectorConfig
from kvcommon.errors import ConfigError
from kvcommon.ids import EngineId, new_epoch
from kvcommon.messages import RankIdentity, Welcome
from kvsched.blocks import HeldBlocks
from kvsched.core.commands import (
    AnswerMatch,
    FenceDaemon,
    FreeBlocks,
    HoldBlocks,
    SchedCommand,
    SendToDaemon,
    TellModel,
)
from kvsched.core.core import CoreConfig
from kvsched.core.events import (
    BlocksAllocated,
    RanksKnown,
    RequestFinished,
    ResetAsked,
    SchedEvent,
    StepFinished,
    Ticked,
)
from kvsched.link import DaemonLink
from kvsched.metadata import RankInfo, StepMetadata, step_metadata
from kvsched.promises import Promises
from kvsched.questions import Questions
from kvsched.ranks import Ranks, is_its_process
from kvsched.recording import SchedulerLog
from kvsched.silence import patience_ns
from kvsched.steps import scheduled_step

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvferry.scheduler")

#: How often sockets are drained while nothing of ours is pending.
_IDLE_POLL_NS = 50_000_000
_TICK_NS = 250_000_000
_NS_PER_MS = 1_000_000
_NO_HIT: tuple[int | None, bool] = (0, False)
_NO_PLAN: StepMetadata | None = None


def _never(_link: DaemonLink, _pid: int) -> bool:
    return False


P = ParamSpec("P")
R = TypeVar("R")


def guarded(
    default: Callable[[], R],
) -> Callable[
    [Callable[Concatenate["SchedulerShell", P], R]], Callable[Concatenate["SchedulerShell", P], R]
]:
    """Answer ``default()`` when switched off, and switch off on any exception."""

    def wrap(
        method: Callable[Concatenate["SchedulerShell", P], R],
    ) -> Callable[Concatenate["SchedulerShell", P], R]:
        @functools.wraps(method)
        def call(self: "SchedulerShell", /, *args: P.args, **kwargs: P.kwargs) -> R:
            if self.off:
                return default()
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 (see the fault rule above)
                self.switch_off(method.__name__, error)
                return default()

        return call

    return wrap


class SchedulerShell:
    """Everything of the scheduler side that is not a decision."""

    def __init__(self, config: ConnectorConfig, engine: EngineId, core_config: CoreConfig) -> None:
        """Make the core; conversations start when vLLM names the ranks."""
        self._config = config
        self._engine = engine
        self._epoch = new_epoch()
        self._log = SchedulerLog(config, engine, self._epoch, core_config)
        self._core = self._log.core
        self._blocks = HeldBlocks()
        self._ranks: Ranks | None = None
        self._promises = Promises(core_config.block_size)
        self._questions = Questions()
        self._step = 0
        self._lookup_wait_ns = int(config.lookup_wait_ms * _NS_PER_MS)
        #: What lookups may still wait in this step, all together.
        self._wait_left_ns = self._lookup_wait_ns
        self._polled_at = 0
        self._ticked_at = 0
        self._answers: list[AnswerMatch] = []
        self._tell: TellModel | None = None
        self._gauges: dict[str, int] = {}
        #: A fault switched us off; see the module docstring.
        self.off = False

    # -- start ---------------------------------------------------------------------------------

    def bind_block_pool(self, pool: "BlockPool") -> None:
        """Take vLLM's block pool (it comes before any request)."""
        self._blocks.bind(pool)

    @guarded(lambda: None)
    def ranks_known(self, infos: Sequence[RankInfo]) -> None:
        """Take vLLM's handshake: open a conversation with each rank's daemon."""
        infos = sorted(infos, key=lambda info: info.rank)
        self._handle(
            RanksKnown(
                now_ns=time.monotonic_ns(),
                ranks=tuple(
                    RankIdentity(rank=info.rank, fingerprint=info.fingerprint) for info in infos
                ),
            )
        )
        self._ranks = Ranks(
            zmq.Context.instance(),
            self._engine,
            self._epoch,
            infos,
            emit=self._handle,
            open_jobs=self._core.open_jobs,
            heartbeat_ms=self._config.heartbeat_ms,
            on_welcome=self._welcomed,
            # An inline daemon is a thread of the process that runs the model.
            may_kill=is_its_process if self._config.mode == "daemon" else _never,
            patience_ns=lambda rank: patience_ns(
                self._config.fence_timeout_ms, is_loading=self._core.is_loading(rank)
            ),
        )

    # -- vLLM's calls --------------------------------------------------------------------------

    @guarded(lambda: None)
    def request_added(self, request: "Request") -> None:
        """``on_new_request``: look the request up before it is first scheduled."""
        self._poll()
        # While the engine was idle nobody greeted a daemon that came back.
        while self._ranks is not None and (rank := self._ranks.greeting()) is not None:
            if not self._wait(rank):
                break
            self._poll()
        self._add(request)

    @guarded(lambda: _NO_HIT)
    def match(self, request: "Request", num_local_tokens: int, /) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``. Waits at most ``lookup_wait_ms`` per step, all told."""
        if request.request_id not in self._questions.requests:
            self._add(request)
        # Looking first saves most repetitions.
        self._poll()
        answer = self._ask(request, num_local_tokens)
        while answer.num_tokens is None and self._wait(0):
            self._poll()
            answer = self._ask(request, num_local_tokens)
        if answer.num_tokens:
            self._promises.offered(
                request.request_id, num_local_tokens, asynchronous=answer.asynchronous
            )
        return answer.num_tokens, answer.asynchronous

    def allocated(
        self, request: "Request", block_ids: Iterable[int], num_external_tokens: int
    ) -> None:
        """``update_state_after_alloc``; noted also when switched off."""
        blocks = tuple(block_ids)
        self._promises.admitted(request.request_id, blocks, num_external_tokens)
        self._allocated(request, blocks, num_external_tokens)

    @guarded(lambda: None)
    def _allocated(
        self, request: "Request", block_ids: tuple[int, ...], num_external_tokens: int, /
    ) -> None:
        if request.request_id not in self._questions.requests:
            self._add(request)
        self._handle(
            BlocksAllocated(
                now_ns=time.monotonic_ns(),
                request_id=request.request_id,
                block_ids=block_ids,
                num_external_tokens=num_external_tokens,
            )
        )

    def plan(self, output: "SchedulerOutput") -> StepMetadata:
        """``build_connector_meta``: always answers, also when switched off."""
        self._step += 1
        metadata = self._plan(output)
        promised = self._promises.take()
        if self.off and promised:
            # Whatever was planned, the model side will not hear of it, so no daemon begins it.
            return step_metadata(TellModel(step=self._step, loads=promised), lost=True)
        return metadata or StepMetadata(self._step)

    @guarded(lambda: _NO_PLAN)
    def _plan(self, output: "SchedulerOutput", /) -> StepMetadata | None:
        self._wait_left_ns = self._lookup_wait_ns
        now_ns = time.monotonic_ns()
        if self._core.has_pending or now_ns - self._polled_at > _IDLE_POLL_NS:
            self._poll()
        core = self._core
        event = scheduled_step(
            output,
            self._step,
            now_ns,
            active=core.active,
            requests=self._questions.requests,
            told=self._questions.told,
        )
        self._tell = None
        if event.requests or event.preempted or core.wants_step:
            self._handle(event)
        self._log.flush()
        return step_metadata(self._tell) if self._tell is not None else None

    @guarded(lambda: None)
    def step_finished(self, step: int, invalid_block_ids: Iterable[int]) -> None:
        """``update_connector_output`` of a step in which a rank had something to report."""
        self._handle(
            StepFinished(
                now_ns=time.monotonic_ns(),
                step=step,
                invalid_block_ids=tuple(sorted(invalid_block_ids)),
            )
        )

    @guarded(lambda: None)
    def request_finished(self, request_id: str) -> None:
        """``request_finished``, on any end."""
        self._promises.forget(request_id)
        if self._questions.forget(request_id):
            self._handle(RequestFinished(now_ns=time.monotonic_ns(), request_id=request_id))

    @guarded(lambda: False)
    def reset(self) -> bool:
        """``reset_cache``: forget what is stored. False: not every daemon could be told now.

        Those that could not are told before they serve this engine again, so it will not load what
        it was to forget; but until then the store holds it.
        """
        self._poll()
        self._handle(ResetAsked(now_ns=time.monotonic_ns()))
        owing = self._core.owing_reset
        if self._ranks is not None and not owing:
            logger.info("kvferry: the daemons were told to forget what is stored for this engine")
            return True
        logger.warning(
            "kvferry: reset: %s cannot be told now to forget what is stored; they are told before "
            "they serve this engine again",
            f"the daemons of ranks {list(owing)}" if owing else "the daemons are not known yet and",
        )
        return False

    @property
    def has_pending(self) -> bool:
        """Jobs are open or blocks held: vLLM must keep stepping so that we hear of their end."""
        return not self.off and self._core.has_pending

    @property
    def counters(self) -> Mapping[str, int]:
        """The core's counters, ever growing, and gauges (``docs/metrics.md``)."""
        quarantined = self._core.num_quarantined_blocks
        if quarantined or "blocks_quarantined" in self._gauges:
            self._gauges["blocks_quarantined"] = quarantined
            return {**self._core.counters, **self._gauges}
        return self._core.counters

    def close(self) -> None:
        """End conversations, write out the log."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        self._log.close()

    def switch_off(self, where: str, error: Exception) -> None:
        """Stop taking part, for the rest of this engine's life."""
        self.off = True
        logger.error(
            "kvferry: internal fault in %s; this engine serves on without the cache until it is "
            "restarted. Please report it with the event log%s.",
            where,
            f" {self._log.place}" if self._log.place else " (set event_log to have one)",
            exc_info=error,
        )
        self._questions.clear()
        self._log.close()

    # -- inside --------------------------------------------------------------------------------

    def _add(self, request: "Request") -> None:
        self._handle(self._questions.added(request))

    def _ask(self, request: "Request", num_local_tokens: int) -> AnswerMatch:
        event = self._questions.asked(self._core, request, num_local_tokens)
        if event is None:
            return AnswerMatch(request_id=request.request_id, num_tokens=None)
        self._answers.clear()
        self._handle(event)
        (answer,) = self._answers
        self._questions.answered(answer)
        return answer

    def _wait(self, rank: int) -> bool:
        """Wait for a rank's daemon with what is left of this step's time. False: heard nothing."""
        if self._ranks is None or self._wait_left_ns <= 0:
            return False
        started_ns = time.monotonic_ns()
        heard = self._ranks.wait(rank, self._wait_left_ns / _NS_PER_MS)
        self._wait_left_ns -= time.monotonic_ns() - started_ns
        return heard

    def _poll(self) -> None:
        now_ns = self._polled_at = time.monotonic_ns()
        if self._ranks is not None:
            self._ranks.poll()
        if now_ns - self._ticked_at > _TICK_NS:
            self._ticked_at = now_ns
            silent = self._ranks.silences() if self._ranks is not None else ()
            self._handle(Ticked(now_ns=now_ns, silent_ms=silent))

    def _welcomed(self, welcome: Welcome) -> None:
        try:
            self._log.offer(welcome.event_log)
        except ConfigError as error:
            logger.warning("kvferry: no event log beside the daemon's: %s", error)

    def _handle(self, event: SchedEvent, cause: str = "") -> None:
        for command in self._log.handle(event, cause):
            self._do(command)

    def _do(self, command: SchedCommand) -> None:
        if isinstance(command, SendToDaemon):
            if self._ranks is not None:
                self._ranks.send(command.rank, command.body, self._log.stimulus)
        elif isinstance(command, AnswerMatch):
            self._answers.append(command)
        elif isinstance(command, HoldBlocks):
            self._blocks.hold(command.block_ids)
        elif isinstance(command, FreeBlocks):
            self._blocks.free(command.block_ids)
        elif isinstance(command, FenceDaemon):
            if self._ranks is not None:
                self._ranks.fence(command.rank)
        else:
            self._tell = command
