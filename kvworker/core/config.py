"""What the daemon's core needs to know before its first event; recorded in the log's header."""

import msgspec


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Configuration of ``WorkerCore``: a core made of an equal one answers equally."""

    #: The device that this daemon serves, for example ``cpu:0``. Others are refused.
    device: str
    #: Name of the store, for people.
    store: str
    #: Process id of the daemon; goes out in ``Welcome`` and ``Attached``.
    pid: int = 0
    #: Directory of the event log; goes out in ``Welcome``.
    event_log: str = ""
    #: Assert every invariant after each event.
    validate: bool = False
    #: Answers in a row that say "the store cannot be reached" until the breaker opens.
    store_down_after: int = 3
    #: How often an unreachable store is asked again, milliseconds.
    probe_interval_ms: int = 1000
    #: After a step's verdict its saves wait so long for layers that were never reported computed.
    verdict_grace_ms: int = 5000
    #: Steps whose computed layers are remembered before their plan has come.
    step_memory: int = 64
    #: Jobs open at once; more end at once as failed (``overload``).
    max_open_jobs: int = 4096
    #: Lookups in flight at once; more are answered 0 (``overload``).
    max_lookups: int = 1024
    #: Ended jobs remembered, to report them again and to know a repeated job id.
    ended_memory: int = 8192
    #: Ranks remembered after they went away.
    max_engines: int = 64
    #: Namespaces remembered, to say how a new one differs.
    max_namespaces: int = 64
