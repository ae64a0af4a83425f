"""vLLM's request objects, and what the core was told and asked of each.

vLLM asks for a request's hit in every step until it has an answer. While a lookup is out, asking
again changes nothing and is answered without the core, so that many waiting requests neither cost
time nor fill the event log: the first question is recorded, and the one that has an answer.
"""

import time
from typing import TYPE_CHECKING

from kvsched.core.commands import AnswerMatch
from kvsched.core.core import SchedCore
from kvsched.core.events import MatchAsked, RequestAdded

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Questions:
    """Requests from their arrival to their end. Belongs to vLLM's scheduler thread."""

    def __init__(self) -> None:
        #: By id, for their growing lists of hashes.
        self.requests: dict[str, Request] = {}
        #: How many hashes of a request the core was told.
        self.told: dict[str, int] = {}
        #: Requests whose last question was answered "ask again".
        self._waiting: set[str] = set()

    def added(self, request: "Request") -> RequestAdded:
        """Take a request in: what the core is to be told."""
        hashes = tuple(request.block_hashes)
        self.requests[request.request_id] = request
        self.told[request.request_id] = len(hashes)
        self._waiting.discard(request.request_id)
        return RequestAdded(
            now_ns=time.monotonic_ns(),
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            block_hashes=hashes,
            skip_lookup=bool(getattr(request, "skip_reading_prefix_cache", False)),
        )

    def asked(
        self, core: SchedCore, request: "Request", num_local_tokens: int
    ) -> MatchAsked | None:
        """What the core is to be asked; None if it would only say "ask again" once more."""
        request_id, hashes = request.request_id, request.block_hashes
        grown = len(hashes) > self.told[request_id]
        now_ns = time.monotonic_ns()
        if (
            not grown
            and request_id in self._waiting
            and core.only_waits(request_id, request.num_tokens, now_ns)
        ):
            return None
        self.told[request_id] = len(hashes)
        return MatchAsked(
            now_ns=now_ns,
            request_id=request_id,
            num_tokens=request.num_tokens,
            num_local_tokens=num_local_tokens,
            block_hashes=tuple(hashes) if grown else (),
        )

    def answered(self, answer: AnswerMatch) -> None:
        """Note what the core said."""
        if answer.num_tokens is None:
            self._waiting.add(answer.request_id)
        else:
            self._waiting.discard(answer.request_id)

    def forget(self, request_id: str) -> bool:
        """A request has ended. False: it was not known."""
        self.told.pop(request_id, None)
        self._waiting.discard(request_id)
        return self.requests.pop(request_id, None) is not None

    def clear(self) -> None:
        """Let go of all."""
        self.requests.clear()
        self.told.clear()
        self._waiting.clear()
