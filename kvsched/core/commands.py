"""What the scheduler side's core answers. Imperative; plain data; carried out by the shell."""

from typing import Union

import msgspec

from kvcommon.messages import SchedulerToDaemon


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of the core's commands."""


class SendToDaemon(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Say this to the daemon of one rank."""

    rank: int
    body: SchedulerToDaemon


class AnswerMatch(Command, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to ``MatchAsked``. ``num_tokens`` None: ask again."""

    request_id: str
    num_tokens: int | None
    #: vLLM's ``load_kv_async``.
    asynchronous: bool = False
    #: A word of ``docs/reasons.md`` where the answer is 0 or None.
    reason: str = ""


class HoldBlocks(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Take one reference on each of these blocks for a job (``block_pool.touch``)."""

    job_id: int
    block_ids: tuple[int, ...]


class FreeBlocks(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Give the references of an ended job back (``block_pool.free_blocks``)."""

    job_id: int
    block_ids: tuple[int, ...]


class ModelLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A load as the model side sees it."""

    job_id: int
    request_id: str
    layerwise: bool
    #: Reported as failed if the daemon does not answer in time.
    block_ids: tuple[int, ...]


class TellModel(Command, frozen=True, kw_only=True, omit_defaults=True):
    """What the model side must know about a step; travels in vLLM's own metadata."""

    step: int
    #: Loads it waits for: layerwise ones in this step, asynchronous ones until they end.
    loads: tuple[ModelLoad, ...] = ()
    #: The step has saves: say ``LayersComputed``.
    saves: bool = False
    #: Asynchronous loads to give up (aborted requests); each is still reported ended.
    cancel: tuple[int, ...] = ()


class FenceDaemon(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Kill the daemon of one rank: it is silent and may touch blocks at any moment.

    Answered by ``DaemonLost(dead=True)`` once its process has ended, or by ``FenceFailed``.
    """

    rank: int


SchedCommand = Union[SendToDaemon, AnswerMatch, HoldBlocks, FreeBlocks, TellModel, FenceDaemon]
