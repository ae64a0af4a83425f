"""Checks that every device needs: shared memory, run directory, limits."""

import os
import resource
from collections.abc import Iterator

from kvcommon.endpoints import run_dir
from kvcommon.errors import ConfigError
from kvworker.doctor.report import Finding, Surroundings, fail, ok, warn

_GIB = 1 << 30
_SHM = "/dev/shm"  # noqa: S108 - it is asked for, not written to
#: Docker's default is 64 MiB.
_SMALL_SHM = 1 * _GIB
#: Sockets, memory files and events of a few engines.
_FEW_FILES = 1024


def check_host(around: Surroundings) -> Iterator[Finding]:
    """Look at what does not depend on the device."""
    yield _shm(around)
    yield _run_directory(around)
    yield _open_files()
    yield _locked_memory()
    yield _hash_seed(around)


def _shm(around: Surroundings) -> Finding:
    free = around.free_bytes(_SHM)
    found = f"{free / _GIB:.2f} GiB free"
    if free >= _SMALL_SHM:
        return ok(_SHM, found)
    remedy = (
        "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory. "
        "Engine and daemon need the same one: --ipc=host, or --ipc=container:<engine>"
    )
    return (fail if free == 0 else warn)(_SHM, found if free else "not there", remedy)


def _run_directory(around: Surroundings) -> Finding:
    try:
        return ok("run directory", str(run_dir("", around.environ)))
    except ConfigError as error:
        return fail("run directory", str(error), "set KVFERRY_RUN_DIR to a directory of your own")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return ok("open files", str(soft))
    return warn("open files", str(soft), f"ulimit -n {_FEW_FILES} or more (LimitNOFILE=)")


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return ok("locked memory", "unlimited")
    remedy = "ulimit -l unlimited (LimitMEMLOCK=infinity): RDMA and pinned memory need it"
    return warn("locked memory", f"{soft} bytes", remedy)


def _hash_seed(around: Surroundings) -> Finding:
    seed = around.environ.get("PYTHONHASHSEED", "")
    if seed.isdecimal():
        return ok("PYTHONHASHSEED", seed)
    remedy = (
        "start every engine with PYTHONHASHSEED=0: block hashes may differ between processes "
        "otherwise, and then nothing that one stored is found by another"
    )
    return warn("PYTHONHASHSEED", seed or "not set here", remedy)
