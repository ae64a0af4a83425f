"""A small client of vLLM's OpenAI server, on the standard library alone.

Every call is bounded. What the server refuses or does not answer is an ``ApiError``.
"""

import contextlib
import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REQUEST_S = 120.0
#: Blocks that are still being saved make a reset fail for a moment; this is how long to retry.
RESET_S = 30.0


class ApiError(Exception):
    """The server refused a call or did not answer in time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What one streamed chat answer was."""

    request_id: str
    text: str
    #: The text of each generated token, and its logprob.
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    num_prompt_tokens: int
    #: Tokens of the prompt that came from a cache, the local or the external one.
    num_cached_tokens: int
    first_token_s: float
    finish_reason: str


def is_healthy(url: str) -> bool:
    """Say whether the server answers its health check."""
    with contextlib.suppress(ApiError):
        _call(url, "/health", timeout_s=2.0)
        return True
    return False


def reset_prefix_cache(url: str, timeout_s: float = RESET_S) -> int:
    """Empty the engine's own prefix cache, and return how often it had to be asked.

    Raises:
        ApiError: blocks were still held after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    tries = 0
    while True:
        tries += 1
        answer = json.loads(_call(url, "/reset_prefix_cache", body={}))
        if answer["success"]:
            return tries
        if time.monotonic() > deadline:
            raise ApiError(f"the prefix cache cannot be reset: blocks held for {timeout_s:.0f} s")
        time.sleep(0.02)


def metrics(url: str) -> dict[str, float]:
    """Return the server's Prometheus samples by name, summed over their labels."""
    found: dict[str, float] = {}
    for line in _call(url, "/metrics").decode().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def external_tokens(url: str) -> int:
    """Return how many prompt tokens the engine has taken from the external cache so far.

    The server counts a request a moment after its last token has been sent; this is waited for.

    Raises:
        ApiError: it still counts requests as running after ``RESET_S``.
    """
    deadline = time.monotonic() + RESET_S
    while True:
        found = metrics(url)
        started = found.get("vllm:prompt_tokens_total", 0)
        if not found.get("vllm:num_requests_running", 0):
            again = metrics(url)
            if again.get("vllm:prompt_tokens_total", 0) == started:
                return int(again.get("vllm:external_prefix_cache_hits_total", 0))
        if time.monotonic() > deadline:
            raise ApiError("the engine does not become idle")
        time.sleep(0.02)


def chat(
    url: str, messages: Sequence[Mapping[str, str]], *, max_tokens: int, model: str = "tiny"
) -> Reply:
    """Ask for one greedy answer, streamed, with the logprob of every token.

    Raises:
        ApiError: refused, cut off, or too late.
    """
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.monotonic()
    first = 0.0
    entries: list[tuple[str, float]] = []
    text: list[str] = []
    request_id = finish = ""
    usage: dict[str, Any] = {}
    for chunk in _events(url, "/v1/chat/completions", body):
        request_id = chunk.get("id", request_id)
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            content = (choice.get("logprobs") or {}).get("content") or ()
            if content and not entries:
                first = time.monotonic() - started
            entries += [(entry["token"], entry["logprob"]) for entry in content]
            text.append(choice["delta"].get("content") or "")
            finish = choice.get("finish_reason") or finish
    if not usage or not finish:
        raise ApiError(f"the answer was cut off after {len(entries)} tokens")
    details = usage.get("prompt_tokens_details") or {}
    return Reply(
        request_id=request_id,
        text="".join(text),
        tokens=tuple(token for token, _ in entries),
        logprobs=tuple(logprob for _, logprob in entries),
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=details.get("cached_tokens") or 0,
        first_token_s=first,
        finish_reason=finish,
    )


def _events(url: str, path: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer as they arrive."""
    request = _request(url, path, body)
    with _errors(path), urllib.request.urlopen(request, timeout=REQUEST_S) as answer:  # noqa: S310
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise ApiError(f"{path}: {event['error']}")
            yield event


def _call(
    url: str, path: str, body: Mapping[str, object] | None = None, timeout_s: float = REQUEST_S
) -> bytes:
    request = _request(url, path, body)
    with _errors(path), urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
        content: bytes = answer.read()
    return content


def _request(url: str, path: str, body: Mapping[str, object] | None) -> urllib.request.Request:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data)  # noqa: S310 - only loopback URLs
    request.add_header("Content-Type", "application/json")
    return request


@contextlib.contextmanager
def _errors(path: str) -> Iterator[None]:
    """Turn what a call can raise into ``ApiError``."""
    try:
        yield
    except urllib.error.HTTPError as error:
        detail = error.read(2000).decode(errors="replace")
        raise ApiError(f"{path}: HTTP {error.code}: {detail}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ApiError(f"{path}: {error!r}") from error
