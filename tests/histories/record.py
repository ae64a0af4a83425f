"""Records the histories of this folder anew. Run it when a core decides otherwise on purpose.

    .venv/bin/python tests/histories/record.py [real[/NAME]] [faults] [violations]

``real``: vLLM engines on this CPU, real daemons, the embedded store or a real Mooncake, and real
faults (minutes). ``faults`` and ``violations``: both real cores in a small world that is broken
around them, or with a core that is broken itself (``tests/kvreplay/test_broken_cores.py``);
seconds.

What each must say is beside it in ``expected.json``, and in ``test_matrix.py``: read the difference
before committing it.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "common"), str(ROOT / "tools")]

from tests.histories.saying import says, tells  # noqa: E402
from tests.histories.scenes import REAL, STAGE  # noqa: E402
from tests.histories.stage import Stage  # noqa: E402
from tests.kvreplay.pair import Pair  # noqa: E402
from tests.kvreplay.test_broken_cores import CORES  # noqa: E402
from tests.kvreplay.test_faults import WORLD  # noqa: E402
from tinymodel import make_model  # noqa: E402

HERE = Path(__file__).parent
#: Scenes played at once.
NUM_AT_ONCE = 2
#: vLLM on a busy machine does not always start.
NUM_TRIES = 2


def record_real(title: str) -> None:
    """Play one scene, and keep its logs if it could be played."""
    play, setting = REAL[title]
    folder = STAGE / title
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with Stage(folder, make_model(folder / "tiny"), setting) as stage:
        play(stage)
    keep(folder / "logs", HERE / "real" / title)
    shutil.rmtree(folder)


def record_every_real() -> list[str]:
    """Each in a process of its own, twice if need be; returns those that failed."""

    def record(title: str) -> str:
        command = [sys.executable, __file__, f"real/{title}"]
        for _ in range(NUM_TRIES):
            if subprocess.run(command, check=False).returncode == 0:
                return ""
        return title

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        return list(filter(None, pool.map(record, REAL)))


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
    expected = says(target)
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    # For whoever runs it.
    sys.stdout.write(f"{target.parent.name}/{target.name}: verify says {expected['status']}\n")
    sys.stdout.writelines(f"  {one}\n" for one in tells(target))
    sys.stdout.flush()


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ("real", "faults", "violations"):
        kind, _, title = wanted.partition("/")
        if title:
            record_real(title)
        elif kind == "real":
            failed = record_every_real()
            if failed:
                sys.exit(f"could not be recorded: {', '.join(failed)}")
        else:
            record_made(wanted)
