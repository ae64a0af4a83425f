"""Nothing of a device, a store or vLLM is loaded before it is needed."""

import subprocess
import sys
from pathlib import Path

from tests.support.daemonproc import environment

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "torch_npu", "mooncake", "vllm")


def modules() -> list[str]:
    """Every module of the product that is loaded outside of vLLM."""
    found = []
    for folder in ("common/kvcommon", "kvworker"):
        base = ROOT / folder
        for path in sorted(base.rglob("*.py")):
            parts = (base.name, *path.relative_to(base).with_suffix("").parts)
            name = ".".join(part for part in parts if part != "__init__")
            if name != "kvworker.__main__":
                found.append(name)
    return found


def test_importing_every_module_loads_nothing_heavy() -> None:
    names = modules()
    assert "kvworker.devices.npu" in names
    assert "kvcommon.memory.export" in names
    program = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert done.stdout.strip() == "[]"
