"""Steps of the model side in a thread that the kernel kills at any system call but read and write.

Run as a program: forks a child for each scenario, lets it warm up, seals it (seccomp, strict mode)
and prints what it managed to say as one JSON line. ``begun`` without ``ok``: it was killed.
"""

import ctypes
import gc
import json
import os
import sys
import types

import zmq

# vLLM's bases of what it carries are empty marks; importing vLLM itself takes many seconds.
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_base = types.ModuleType(_BASE)
for _name in ("Metadata", "HandshakeMetadata", "WorkerMetadata"):
    setattr(_base, f"KVConnector{_name}", type(f"KVConnector{_name}", (), {}))
sys.modules[_BASE] = _base
for _at in range(1, _BASE.count(".") + 1):
    _parent = ".".join(_BASE.split(".")[:_at])
    sys.modules[_parent] = types.ModuleType(_parent)

import kvsched.model_side  # noqa: E402
from kvcommon.memory.page import ProgressPage  # noqa: E402
from kvsched.link import DaemonLink  # noqa: E402
from kvsched.metadata import StepMetadata  # noqa: E402
from kvsched.model_side import ModelSide  # noqa: E402
from tests.support.modelside import StillAttachment, model_side, run_step, saving  # noqa: E402

IDLE_STEPS = 5_000
_WARM_STEPS = 200
_PR_SET_SECCOMP, _SECCOMP_MODE_STRICT = 22, 1


def idle(model: ModelSide) -> None:
    """Nothing to load or save."""
    metadata = StepMetadata(1)
    for _ in range(IDLE_STEPS):
        run_step(model, metadata)


def save(model: ModelSide) -> None:
    """The control: one step that has something to say.

    The kernel takes the clock away too (by SIGSEGV); what is shown here is a system call.
    """
    stopped = types.SimpleNamespace(monotonic_ns=lambda: 0)
    setattr(kvsched.model_side, "time", stopped)  # noqa: B010
    run_step(model, saving(2))


SCENARIOS = {"idle": idle, "save": save}


def child(scenario: str, say: int) -> None:
    """Warm up, seal, act, say ok."""
    page = ProgressPage.create()
    link = DaemonLink(zmq.Context(), "inproc://nobody", 0, "data")
    model = model_side(StillAttachment(), page, link)
    for _ in range(_WARM_STEPS):
        run_step(model, StepMetadata(1))
    libc = ctypes.CDLL(None, use_errno=True)
    gc.collect()
    gc.disable()
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_STRICT, 0, 0, 0) != 0:
        os.write(say, f"unavailable: errno {ctypes.get_errno()}".encode())
        return
    os.write(say, b"begun ")
    SCENARIOS[scenario](model)
    os.write(say, b"ok" if link._socket is None else b"opened")


def main() -> None:
    """Run each scenario named on the command line."""
    found = {}
    for scenario in sys.argv[1:]:
        hear, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(scenario, say)
            os._exit(0)
        os.close(say)
        with os.fdopen(hear, "rb") as pipe:
            said = pipe.read().decode()
        _, status = os.waitpid(pid, 0)
        found[scenario] = {"said": said, "status": status}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
