"""Records the histories of this folder anew. Run it when a core decides otherwise on purpose.

    .venv/bin/python tests/histories/record.py [real[/NAME]] [faults] [violations]

``real``: vLLM engines on this CPU, real daemons, the embedded store or a real Mooncake (minutes).
``faults`` and ``violations``: both real cores in a small world that is broken around them, or with
a core that is broken itself (``tests/kvreplay/test_broken_cores.py``); seconds.

What each must say is beside it in ``expected.json``: read the difference before committing it.
"""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "common"), str(ROOT / "tools")]

from localmaster import LocalMaster  # noqa: E402
from tests.e2e.engines import EngineError  # noqa: E402
from tests.e2e.stack import Stack, mooncake_file, prompt  # noqa: E402
from tests.histories.saying import says  # noqa: E402
from tests.kvreplay.pair import Pair  # noqa: E402
from tests.kvreplay.test_broken_cores import CORES  # noqa: E402
from tests.kvreplay.test_faults import WORLD  # noqa: E402
from tinymodel import make_model  # noqa: E402

HERE = Path(__file__).parent


def layerwise(stack: Stack) -> None:
    """A prompt is saved in chunks, forgotten, loaded; then one that shares its beginning."""
    with stack.engine(max_num_batched_tokens=128) as engine:
        engine.call("wait_attached")
        engine.generate([prompt(1, 300)])
        engine.forget()
        engine.generate([prompt(1, 300)])
        engine.generate([[*prompt(1, 160), *prompt(2, 100)], prompt(3, 40)])
        engine.settle()


def asynchronous(stack: Stack) -> None:
    """Loads between steps."""
    with stack.engine(stack.connector(load="async")) as engine:
        engine.call("wait_attached")
        engine.generate([prompt(1, 200), prompt(2, 200)])
        engine.forget()
        engine.generate([prompt(1, 200), prompt(2, 200), prompt(3, 100)])
        engine.settle()


def daemon_killed(stack: Stack) -> None:
    """The daemon dies between two prompts; the engine serves on without it."""
    with stack.engine() as engine:
        engine.call("wait_attached")
        engine.generate([prompt(1, 200)])
        engine.forget()
        stack.daemons["cpu:0"].kill()
        engine.generate([prompt(1, 200)])


def engine_killed(stack: Stack) -> None:
    """The engine dies; another one takes what it had saved."""
    with contextlib.suppress(EngineError), stack.engine() as engine:
        engine.call("wait_attached")
        engine.generate([prompt(1, 200)])
        engine.settle()
        engine.kill()
        raise EngineError
    with stack.engine() as engine:
        engine.call("wait_attached")
        engine.generate([prompt(1, 200)])
        engine.settle()


def two_ranks(stack: Stack) -> None:
    """A model on two ranks, each with its daemon; saved, forgotten, loaded."""
    with stack.engine(tensor_parallel_size=2, distributed_executor_backend="mp") as engine:
        engine.call("wait_attached")
        engine.generate([prompt(1, 200)])
        engine.forget()
        engine.generate([prompt(1, 200), prompt(2, 70)])
        engine.settle()


class Scene(NamedTuple):
    """What is recorded as ``real``."""

    play: Callable[[Stack], None]
    with_mooncake: bool = False
    devices: tuple[str, ...] = ("cpu:0",)


REAL = {
    "layerwise": Scene(layerwise),
    "mooncake": Scene(layerwise, with_mooncake=True),
    "asynchronous": Scene(asynchronous),
    "daemon-killed": Scene(daemon_killed),
    "engine-killed": Scene(engine_killed),
    "two-ranks": Scene(two_ranks, with_mooncake=True, devices=("cpu:0", "cpu:1")),
}


def record_real(titles: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvh") as name, LocalMaster() as master:
        model = make_model(Path(name) / "tiny")
        for title in titles:
            scene = REAL[title]
            folder = Path(name) / title
            folder.mkdir()
            config = mooncake_file(folder, master.address) if scene.with_mooncake else None
            with Stack(folder, model, config, scene.devices) as stack:
                scene.play(stack)
            keep(folder / "logs", HERE / "real" / title)


def record_made(kind: str) -> None:
    scenes = {fault.__name__: (fault, needs) for fault, needs, *_ in WORLD}
    if kind == "violations":
        scenes = {fault.__name__: (fault, needs) for fault, needs, *_ in CORES}
    for title, (fault, needs) in scenes.items():
        with tempfile.TemporaryDirectory() as name:
            pair = Pair(Path(name), **needs)
            fault(pair)
            pair.close()
            keep(Path(name), HERE / kind / title.replace("_", "-"))


def keep(logs: Path, target: Path) -> None:
    """Copy logs, and write down what they say now."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(logs.glob("*.kvlog")):
        shutil.copy(path, target)
    expected = json.dumps(says(target), indent=1)
    (target / "expected.json").write_text(expected + "\n", encoding="utf-8")
    print(f"{target.relative_to(HERE)}: {expected}")  # noqa: T201 - for whoever runs it


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ("real", "faults", "violations"):
        kind, _, title = wanted.partition("/")
        if kind == "real":
            record_real([title] if title else REAL)
        else:
            record_made(wanted)
