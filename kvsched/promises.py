"""What vLLM counts on: external tokens that it was offered and has admitted requests with.

vLLM takes such tokens for computed. If our side breaks down between the offer and the plan,
somebody must say that their blocks hold nothing; otherwise the engine would compute on with
rubbish, or wait for an asynchronous load that nobody does. So the shell notes offers here, outside
of the core.
"""

from collections.abc import Sequence

from kvsched.core.commands import ModelLoad


class Promises:
    """Offers and what became of them. Pure; vLLM's scheduler thread alone."""

    def __init__(self, block_size: int) -> None:
        """Take the tokens per block."""
        self._block_size = block_size
        #: Last offer of each request: (tokens that vLLM had itself, loaded asynchronously).
        self._offers: dict[str, tuple[int, bool]] = {}
        self._admitted: list[ModelLoad] = []
        self._next_id = -1

    def offered(self, request_id: str, num_local_tokens: int, *, asynchronous: bool) -> None:
        """Note that vLLM was offered external tokens beyond its own."""
        self._offers[request_id] = (num_local_tokens, asynchronous)

    def forget(self, request_id: str) -> None:
        """The offer is withdrawn, or the request has ended."""
        self._offers.pop(request_id, None)

    def admitted(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """Note that vLLM counts on external tokens. ``block_ids``: all blocks of the request."""
        if num_external_tokens == 0:
            return
        num_local, asynchronous = self._offers.get(request_id, (0, False))
        first = num_local // self._block_size
        end = -(-(num_local + num_external_tokens) // self._block_size)
        self._admitted.append(
            ModelLoad(
                # Never the id of a real job.
                job_id=self._next_id,
                request_id=request_id,
                layerwise=not asynchronous,
                block_ids=tuple(block_ids[first:end]),
            )
        )
        self._next_id -= 1

    def take(self) -> tuple[ModelLoad, ...]:
        """Return what vLLM has begun to count on since the last call."""
        if not self._admitted:
            return ()
        taken, self._admitted = tuple(self._admitted), []
        return taken
