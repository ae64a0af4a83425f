"""The client reads what an OpenAI server streams, and bounds every wait."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import apiclient

Answer = tuple[int, bytes]


class FakeServer(http.server.ThreadingHTTPServer):
    """Answers each path by a function of the request's body."""

    daemon_threads = True

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[dict[str, Any]], Answer]] = {}
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size) or b"{}")
        assert isinstance(self.server, FakeServer)
        status, content = self.server.answers[self.path](body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever)
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


def sse(*events: object) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def piece(text: str, logprob: float, finish: str | None = None) -> dict[str, object]:
    content = [{"token": text, "logprob": logprob}]
    choice = {"delta": {"content": text}, "logprobs": {"content": content}, "finish_reason": finish}
    return {"id": "chatcmpl-1", "choices": [choice]}


USAGE = {
    "id": "chatcmpl-1",
    "choices": [],
    "usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}},
}


def test_chat_reads_a_stream(server: FakeServer) -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> Answer:
        asked.append(body)
        role = {"id": "chatcmpl-1", "choices": [{"delta": {"role": "assistant", "content": ""}}]}
        return 200, sse(role, piece(" yes", -0.5), piece(" no", -1.5, "length"), USAGE)

    server.answers["/v1/chat/completions"] = answer
    reply = apiclient.chat(server.url, [{"role": "user", "content": "?"}], max_tokens=2)
    assert reply.text == " yes no"
    assert reply.tokens == (" yes", " no")
    assert reply.logprobs == (-0.5, -1.5)
    assert (reply.num_prompt_tokens, reply.num_cached_tokens) == (7, 4)
    assert (reply.request_id, reply.finish_reason) == ("chatcmpl-1", "length")
    assert reply.first_token_s > 0
    assert asked[0]["temperature"] == 0
    assert asked[0]["max_tokens"] == 2


def test_chat_without_cached_tokens(server: FakeServer) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "prompt_tokens_details": None}}
    server.answers["/v1/chat/completions"] = lambda _: (200, sse(piece(" a", -1, "stop"), usage))
    assert apiclient.chat(server.url, [], max_tokens=1).num_cached_tokens == 0


@pytest.mark.parametrize(
    ("status", "content", "what"),
    [
        (400, b"too long", "HTTP 400: too long"),
        (200, sse({"error": "engine dead"}), "engine dead"),
        (200, sse(piece(" a", -1)), "cut off after 1 tokens"),
        (200, b"", "cut off after 0 tokens"),
    ],
)
def test_chat_that_goes_wrong(server: FakeServer, status: int, content: bytes, what: str) -> None:
    server.answers["/v1/chat/completions"] = lambda _: (status, content)
    with pytest.raises(apiclient.ApiError, match=what):
        apiclient.chat(server.url, [], max_tokens=1)


def test_reset_is_asked_again_while_blocks_are_held(server: FakeServer) -> None:
    answers = [False, False, True]
    server.answers["/reset_prefix_cache"] = lambda _: (
        200,
        json.dumps({"success": answers.pop(0)}).encode(),
    )
    assert apiclient.reset_prefix_cache(server.url) == 3


def test_reset_gives_up(server: FakeServer) -> None:
    server.answers["/reset_prefix_cache"] = lambda _: (200, b'{"success": false}')
    with pytest.raises(apiclient.ApiError, match="blocks held"):
        apiclient.reset_prefix_cache(server.url, timeout_s=0)


METRICS = b"""# HELP vllm:external_prefix_cache_hits_total Hits
vllm:external_prefix_cache_hits_total{engine="0"} 128.0
vllm:external_prefix_cache_hits_total{engine="1"} 2.0
vllm:num_requests_running{engine="0"} 0.0
"""


def test_metrics_are_summed_over_labels(server: FakeServer) -> None:
    server.answers["/metrics"] = lambda _: (200, METRICS)
    assert apiclient.metrics(server.url)["vllm:external_prefix_cache_hits_total"] == 130
    assert apiclient.external_tokens(server.url) == 130


def test_external_tokens_waits_until_the_engine_is_idle(server: FakeServer) -> None:
    busy = [METRICS.replace(b'running{engine="0"} 0.0', b'running{engine="0"} 1.0')] * 2
    server.answers["/metrics"] = lambda _: (200, busy.pop() if busy else METRICS)
    assert apiclient.external_tokens(server.url) == 130
    assert not busy


def test_health(server: FakeServer) -> None:
    server.answers["/health"] = lambda _: (200, b"")
    assert apiclient.is_healthy(server.url)
    server.answers["/health"] = lambda _: (503, b"")
    assert not apiclient.is_healthy(server.url)
    assert not apiclient.is_healthy("http://127.0.0.1:1")
