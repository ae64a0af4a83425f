"""Checks of an Ascend host: driver, CANN, torch_npu, the card, and the environment's traps."""

import ctypes
import importlib
import importlib.util
import re
import socket
from collections.abc import Iterator

from kvcommon.memory.allocator import expandable
from kvcommon.memory.npu import ALLOC_CONF
from kvworker.doctor.report import Finding, Surroundings, fail, ok, warn
from kvworker.stores.mooncake_ascend import FABRIC, TIMEOUTS, timeout_ms

#: Sharing memory between processes: driver (HDK) and CANN of at least.
_DRIVER, _CANN = (25, 3), (8, 3)
_DRIVER_FILE = "/usr/local/Ascend/driver/version.info"
_CANN_FILES = ("version.cfg", "version.info", "ascend_toolkit_install.info")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\w+))?")
_BASE_PORT, _PORTS_PER_CARD = 11_000, 100


def check_ascend(around: Surroundings) -> Iterator[Finding]:
    """Look at everything but the card itself (``kvworker.doctor.card``)."""
    yield _driver(around)
    yield _cann(around)
    yield _library()
    yield _torch_npu()
    yield _expandable(around)
    yield _fabric(around)
    yield from _network(around)
    yield _ports(around)


def check_lease(around: Surroundings, store_lease_ms: int) -> Finding:
    """A lease must outlast every transfer."""
    longest = timeout_ms({name: around.environ.get(name, "3000") for name in TIMEOUTS})
    found = f"lease {store_lease_ms} ms, transfers up to {longest} ms"
    if store_lease_ms > longest:
        return ok("lease", found)
    remedy = (
        "mooncake_master --default_kv_lease_ttl 11000 and store_lease_ms 11000 in the Mooncake "
        f"configuration, or lower {' and '.join(TIMEOUTS)}"
    )
    return fail("lease", found, remedy)


def _parsed(text: str) -> tuple[int, int] | None:
    found = _VERSION.search(text)
    return (int(found[1]), int(found[2])) if found else None


def _driver(around: Surroundings) -> Finding:
    text = around.read(_DRIVER_FILE)
    version = _parsed(text)
    if version is None:
        remedy = (
            "install the NPU driver; in a container mount /usr/local/Ascend/driver and "
            "/usr/local/dcmi, and pass --device /dev/davinci<n> /dev/davinci_manager "
            "/dev/devmm_svm /dev/hisi_hdc"
        )
        return fail("driver", f"{_DRIVER_FILE} is not there", remedy)
    found = ".".join(map(str, version))
    if version < _DRIVER:
        remedy = "driver (HDK) 25.3.RC1 or later: memory cannot be shared between processes before"
        return fail("driver", found, remedy)
    if version < (26, 0):
        remedy = (
            "events between processes need 26.0.RC1 on hosts with 64 KiB pages; without them the "
            "engine waits for its device itself"
        )
        return warn("driver", found, remedy)
    return ok("driver", found)


def _cann(around: Surroundings) -> Finding:
    home = around.environ.get("ASCEND_HOME_PATH") or around.environ.get("ASCEND_TOOLKIT_HOME", "")
    if not home:
        remedy = "source /usr/local/Ascend/ascend-toolkit/set_env.sh before starting the daemon"
        return fail("CANN", "ASCEND_HOME_PATH is not set", remedy)
    texts = [around.read(f"{home}/{name}") for name in _CANN_FILES]
    version = next((found for found in map(_parsed, texts) if found), None)
    if version is None:
        return warn("CANN", f"no version in {home}", "check that ASCEND_HOME_PATH is CANN's folder")
    found = ".".join(map(str, version))
    if version < _CANN:
        return fail("CANN", found, "CANN 8.3.RC1 or later: memory cannot be shared before")
    return ok("CANN", found)


def _library() -> Finding:
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError as error:
        remedy = "source CANN's set_env.sh: it puts the runtime on LD_LIBRARY_PATH"
        return fail("libascendcl.so", str(error), remedy)
    return ok("libascendcl.so", "loads")


def _torch_npu() -> Finding:
    if importlib.util.find_spec("torch_npu") is None:
        return fail("torch_npu", "not installed", "pip install 'kvferry[npu]'")
    try:
        module = importlib.import_module("torch_npu")
    except (ImportError, RuntimeError, OSError) as error:
        remedy = "torch_npu must fit torch and CANN: see its release notes for the right three"
        return fail("torch_npu", str(error).split("\n", 1)[0][:200], remedy)
    import torch

    shares = hasattr(torch.UntypedStorage, "_share_npu_")
    found = f"{module.__version__} with torch {torch.__version__}"
    if not shares:
        return fail("torch_npu", found, "torch_npu 7.2.0 or later: it cannot share memory before")
    return ok("torch_npu", found)


def _expandable(around: Surroundings) -> Finding:
    if not expandable(around.environ, (ALLOC_CONF,)):
        return ok(ALLOC_CONF, around.environ.get(ALLOC_CONF, "") or "not set")
    remedy = (
        f"start the engine with {ALLOC_CONF}=expandable_segments:False. kvferry switches them off "
        "for the KV cache itself where torch_npu can (7.3.0 and later)"
    )
    return warn(ALLOC_CONF, around.environ[ALLOC_CONF], remedy)


def _fabric(around: Surroundings) -> Finding:
    value = around.environ.get(FABRIC)
    if value in {None, "1"}:
        return ok(FABRIC, "not set" if value is None else "fabric memory is on")
    remedy = f"unset {FABRIC}: the library looks only whether it is there, so this switches it ON"
    return fail(FABRIC, f"set to {value!r}", remedy)


def _network(around: Surroundings) -> Iterator[Finding]:
    if around.path("/etc/hccn.conf").exists():
        yield ok("/etc/hccn.conf", "there")
    else:
        remedy = "mount the host's /etc/hccn.conf: without it cards of two hosts cannot connect"
        yield warn("/etc/hccn.conf", "not there", remedy)
    if around.environ.get("HCCL_INTRA_ROCE_ENABLE") != "1":
        return
    pages = around.read("/proc/sys/vm/nr_hugepages").strip()
    if pages.isdecimal() and int(pages) > 0:
        yield ok("huge pages", pages)
    else:
        remedy = "sysctl vm.nr_hugepages=1024 or more: RoCE between cards of a host needs them"
        yield fail("huge pages", pages or "unknown", remedy)


def _ports(around: Surroundings) -> Finding:
    number = around.device.partition(":")[2]
    first = int(around.environ.get("ASCEND_BASE_PORT", "") or _BASE_PORT)
    first += _PORTS_PER_CARD * int(number or 0)
    if any(_is_free(port) for port in range(first, first + _PORTS_PER_CARD)):
        return ok("ports", f"{first} to {first + _PORTS_PER_CARD - 1} of this card")
    remedy = "all ports of this card are taken: end what uses them, or set ASCEND_BASE_PORT"
    return fail("ports", f"{first} to {first + _PORTS_PER_CARD - 1} are taken", remedy)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
