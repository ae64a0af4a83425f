"""Records the histories of this folder anew. Run it when a core decides otherwise on purpose.

    .venv/bin/python tests/histories/record.py [real] [faults] [violations]

``real``: vLLM engines on this CPU, real daemons, the embedded store or a real Mooncake (minutes).
``faults`` and ``violations``: both real cores in a small world that is broken around them, or with
a core that is broken itself (``tests/kvreplay/test_broken_cores.py``); seconds.

What each must say is beside it in ``expected.json``: read the difference before committing it.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "common"), str(ROOT / "tools")]

from localmaster import LocalMaster  # noqa: E402
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


REAL: dict[str, tuple[Callable[[Stack], None], bool]] = {
    "layerwise": (layerwise, False),
    "mooncake": (layerwise, True),
    "asynchronous": (asynchronous, False),
    "daemon-killed": (daemon_killed, False),
}


def record_real() -> None:
    with tempfile.TemporaryDirectory(prefix="kvh") as name, LocalMaster() as master:
        model = make_model(Path(name) / "tiny")
        for title, (scene, with_mooncake) in REAL.items():
            folder = Path(name) / title
            folder.mkdir()
            config = mooncake_file(folder, master.address) if with_mooncake else None
            with Stack(folder, model, config) as stack:
                scene(stack)
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
        if wanted == "real":
            record_real()
        else:
            record_made(wanted)
