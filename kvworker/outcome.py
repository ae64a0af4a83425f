"""What a store says about one key: the vocabulary that stores, threads and core share."""

import enum


class Outcome(str, enum.Enum):
    """What a store said about one key. A miss and a failure are different things."""

    OK = "ok"
    #: put: stored already, or somebody else is storing it. Not a promise that it can be read now.
    EXISTS = "exists"
    #: get: no such object (never stored, evicted, its owner gone), or one of the wrong size.
    MISS = "miss"
    #: put: no room now.
    FULL = "full"
    #: The lease ended while reading.
    EXPIRED = "expired"
    #: The store cannot be reached.
    DOWN = "down"
    #: The transfer of this key failed.
    FAILED = "failed"
    #: Given up because of ``Cancel``, or because the engine's memory is gone.
    CANCELLED = "cancelled"
