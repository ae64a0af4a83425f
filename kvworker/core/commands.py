"""What the daemon's core answers. Imperative; plain data; carried out by the shell.

A command with an ``op`` starts work in a transfer thread and is answered by exactly one event.
The shell may run commands of different engines at once, but those of one engine and one direction
(save, load) in the order given.
"""

from typing import Union

import msgspec

from kvcommon.messages import Attach, DaemonToModel, DaemonToScheduler


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of the core's commands."""


class SendToModel(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Say this to the engine's model side."""

    engine: str
    body: DaemonToModel


class SendToScheduler(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Say this to the engine's scheduler side."""

    engine: str
    body: DaemonToScheduler


class MapEngine(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Map the memory of this attach, check it, register it with the store. → ``EngineMapped``."""

    op: int
    engine: str
    attach: Attach


class UnmapEngine(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Let go of the engine's memory, once its running operations ended. → ``EngineUnmapped``."""

    op: int
    engine: str


class FindKeys(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Which of these keys can be read? Takes their lease. → ``KeysFound``."""

    op: int
    engine: str
    keys: tuple[str, ...]


class OpenPuts(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Open put sessions for these objects of a group: one store call. → ``PutsOpened``."""

    op: int
    engine: str
    step: int
    group: int
    keys: tuple[str, ...]


class WriteLayers(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Write layers ``[first_layer, end_layer)`` of these blocks into their open put sessions.

    One store call. Block ``block_ids[i]`` goes to ``keys[i]``. → ``LayersWritten``.

    With ``whole`` there are no sessions (``PutsOpened.whole``): the layers are all of them, and the
    call also publishes the objects. It is therefore only given after the verdict.
    """

    op: int
    engine: str
    step: int
    group: int
    keys: tuple[str, ...]
    block_ids: tuple[int, ...]
    first_layer: int
    end_layer: int
    #: Device event after which the layers are written; empty: they are.
    event: bytes = b""
    whole: bool = False


class ClosePuts(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Publish ``end`` and discard ``revoke``: at most one store call each. → ``PutsClosed``."""

    op: int
    engine: str
    step: int
    end: tuple[str, ...] = ()
    revoke: tuple[str, ...] = ()


class OpenGets(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Open get sessions (shared by reference count): one store call. → ``GetsOpened``."""

    op: int
    engine: str
    step: int
    group: int
    keys: tuple[str, ...]


class LoadLayers(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Read layers ``[first_layer, end_layer)`` of open objects into their blocks, in order.

    A key that fails is left out of the layers that follow. → ``LayersLoaded``.
    """

    op: int
    engine: str
    step: int
    group: int
    keys: tuple[str, ...]
    block_ids: tuple[int, ...]
    first_layer: int
    end_layer: int
    #: Advance the progress page of ``step`` after each layer; with the last layer publish whether
    #: any block failed.
    publish: bool = False
    #: With ``publish``: blocks of this step have failed already.
    tainted: bool = False
    #: Device event after which earlier steps no longer touch the blocks; empty: they do not.
    event: bytes = b""


class CloseGets(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Give back one reference per key. → ``GetsClosed``."""

    op: int
    engine: str
    keys: tuple[str, ...]


class PublishProgress(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Write the progress page directly: all layers of ``step`` are as done as they will be."""

    engine: str
    step: int
    num_layers: int
    failed: bool


class Cancel(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Stop an operation between two layers if it is still running. It ends by its own event."""

    op: int


class ResetNamespace(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Remove every object whose key begins with one of these. → ``StoreReset``."""

    op: int
    prefixes: tuple[str, ...]


class ProbeStore(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Ask the store something real. → ``StoreProbed``."""

    op: int


#: Commands that start work: each is answered by one event that quotes its ``op``.
WorkCommand = Union[
    MapEngine,
    UnmapEngine,
    FindKeys,
    OpenPuts,
    WriteLayers,
    ClosePuts,
    OpenGets,
    LoadLayers,
    CloseGets,
    ResetNamespace,
    ProbeStore,
]

WorkerCommand = Union[
    SendToModel,
    SendToScheduler,
    MapEngine,
    UnmapEngine,
    FindKeys,
    OpenPuts,
    WriteLayers,
    ClosePuts,
    OpenGets,
    LoadLayers,
    CloseGets,
    PublishProgress,
    Cancel,
    ResetNamespace,
    ProbeStore,
]
