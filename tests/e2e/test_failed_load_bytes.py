"""Rule 3 by the stored bytes: a load fails inside a step, and nothing wrong is ever published.

A real engine computes the same prompt twice: undisturbed, and with a load whose second layer fails,
so that the step computes on wrong bytes. Then every object of the second store is compared, byte
for byte, with what the first one holds under the same key. The daemon runs in a thread of the test,
which can therefore look into its store.
"""

import contextlib
import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcommon.config import DaemonConfig
from kvworker.inline import InlineDaemon, start
from kvworker.stores.memory import MemoryStore
from kvworker.stores.opening import OpeningStore
from tests.e2e.engines import EngineProcess
from tests.e2e.stack import Stack, cold, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK = 32
CHUNK = 128
#: Both a multiple of the chunk, so that every computation has the same shapes.
SHORT, LONG = 4 * CHUNK, 6 * CHUNK
#: Objects are read layer by layer, as from another node, and the second read fails.
FAILING: list[dict[str, Any]] = [
    {"call": "local", "what": "fail"},
    {"call": "get_ranges", "what": "fail", "outcome": "failed", "after": 1, "times": 1},
]


@contextlib.contextmanager
def daemon(stack: Stack, rules: Sequence[dict[str, Any]]) -> Iterator[InlineDaemon]:
    """A daemon of the stack's run directory, with its store in this process."""
    plan = stack.folder / "plan.json"
    plan.write_text(json.dumps({"store": list(rules)}))
    config = DaemonConfig(
        device="cpu:0",
        store="memory",
        memory_limit=256 << 20,
        run_dir=str(stack.run_dir),
        validate=True,
        inject=str(plan),
        save="layerwise",
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    running = start(config, context=context, endpoints=())
    try:
        yield running
    finally:
        running.stop()
        context.term()


def stored(running: InlineDaemon) -> dict[str, bytes]:
    """All objects of its store."""
    machinery = running._daemon._machinery
    assert machinery is not None
    assert isinstance(machinery.store, OpeningStore)
    inner = machinery.store._inner
    assert isinstance(inner, MemoryStore)
    return {
        key: ctypes.string_at(found.address, found.size) for key, found in inner._objects.items()
    }


def differing(found: Mapping[str, bytes], right: Mapping[str, bytes]) -> list[str]:
    """Keys under which something else is stored, or that should not be there."""
    return [key for key, held in found.items() if held != right.get(key)]


def test_nothing_wrong_is_published(model: Path, reference: EngineProcess, tmp_path: Path) -> None:
    words = prompt(2500, LONG + 1)
    wanted = cold(reference, [words])
    stack = Stack(tmp_path, model, None)
    with stack.engine(max_num_batched_tokens=CHUNK) as engine:
        with daemon(stack, ()) as running:
            engine.call("wait_attached")
            assert engine.generate([words])[0]["tokens"] == wanted[0]["tokens"]
            engine.forget()
            right = stored(running)
        assert len(right) == LONG // BLOCK
        engine.call("wait_attached", attached=False)
        with daemon(stack, FAILING) as running:
            engine.call("wait_attached")
            engine.generate([words[: SHORT + 1]])
            engine.forget()
            before = stored(running)
            assert len(before) == SHORT // BLOCK
            # Its first step computes a chunk behind a prefix of which a layer is missing.
            assert engine.generate([words])[0]["tokens"] == wanted[0]["tokens"]
            engine.forget()
            found = stored(running)
        counters = engine.call("counters")
    assert counters["requests_barred"] == 1
    assert counters["saves_tainted"] >= 1
    assert found.keys() >= before.keys()
    assert differing(found, right) == []
    # The control: one changed byte, in any object, is seen.
    for key, held in found.items():
        changed = held[:-1] + bytes([held[-1] ^ 1])
        assert differing({**found, key: changed}, right) == [key]
