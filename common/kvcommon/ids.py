"""Distinct types for the ids that cross process boundaries.

Each id is made in one place and never edited as text elsewhere. They are ``NewType`` aliases, so
they cost nothing at run time and mypy keeps them apart.
"""

import os
from typing import NewType

#: vLLM's engine id (one scheduler; ``_dp{n}`` is appended by vLLM under data parallelism).
EngineId = NewType("EngineId", str)
#: One rank of one engine, the unit that a daemon serves: ``<engine id>#<rank>``.
EngineKey = NewType("EngineKey", str)
#: vLLM's request id. Comes back after preemption, so it never names work in flight.
RequestId = NewType("RequestId", str)
#: One load or save of one request in one step. Never reused within a scheduler side's life.
JobId = NewType("JobId", int)
#: One lookup of one request. Never reused within a scheduler side's life.
LookupId = NewType("LookupId", int)
#: One started operation of a daemon's transfer threads; answered by one terminal event.
OpId = NewType("OpId", int)
#: A scheduler step, from 1. 0 means "no step".
Step = NewType("Step", int)
#: The incarnation of a process: random, never 0, new at every start.
Epoch = NewType("Epoch", int)
#: vLLM's block hash (16 or 32 bytes), as given.
BlockHash = NewType("BlockHash", bytes)
#: The name of one object in the store: one block of one group on one rank.
StoreKey = NewType("StoreKey", str)
#: Digest of everything that must be equal for stored bytes to be usable (``kvcommon.keys``).
Fingerprint = NewType("Fingerprint", str)


def engine_key(engine: EngineId, rank: int) -> EngineKey:
    """Name one rank of one engine."""
    return EngineKey(f"{engine}#{rank}")


def new_epoch() -> Epoch:
    """Draw a fresh epoch: 63 random bits, never 0 (0 on the wire means "not known yet")."""
    return Epoch(int.from_bytes(os.urandom(8), "big") >> 1 or 1)
