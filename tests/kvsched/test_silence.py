"""Frozen or starved: what the kernel says of real processes, and how it is counted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvcommon.config import ConnectorConfig, MooncakeConfig
from kvsched.silence import Silence, lived_ns, patience_ns

BUSY = "import sys; print(flush=True)\nwhile True: pass"
IDLE = "import sys; print(flush=True); sys.stdin.read()"


@pytest.fixture
def process(request: pytest.FixtureRequest) -> "Iterator[subprocess.Popen[bytes]]":
    child = subprocess.Popen(
        [sys.executable, "-c", request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.kill()
    child.communicate()


@pytest.mark.parametrize("process", [BUSY], indirect=True)
def test_a_busy_process_lives_and_a_stopped_one_does_not(
    process: "subprocess.Popen[bytes]",
) -> None:
    before = lived_ns(process.pid)
    deadline = time.monotonic() + 30
    while lived_ns(process.pid) < before + 50_000_000:
        assert time.monotonic() < deadline, "it neither runs nor waits for a processor"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    stopped = lived_ns(process.pid)
    time.sleep(0.2)
    assert lived_ns(process.pid) == stopped


@pytest.mark.parametrize("process", [IDLE], indirect=True)
def test_a_process_that_waits_for_something_else_stands_still(
    process: "subprocess.Popen[bytes]",
) -> None:
    deadline = time.monotonic() + 30
    before = -1
    while (now := lived_ns(process.pid)) != before:  # until it has come to rest
        assert time.monotonic() < deadline
        before = now
        time.sleep(0.1)
    assert now > 0


def test_no_process_has_not_lived() -> None:
    assert lived_ns(0) == 0
    assert lived_ns(2**22 + 1) == 0


def test_the_default_fence_stays_below_the_store_s_lease() -> None:
    fence_ms = ConnectorConfig().fence_timeout_ms
    longest_ns = fence_ms * 1e6 + patience_ns(fence_ms, is_loading=True)
    assert longest_ns < MooncakeConfig(master_server_address="m:1").store_lease_ms * 1e6
    assert patience_ns(fence_ms, is_loading=False) == 2 * fence_ms * 1e6


def test_a_frozen_daemon_is_silent_all_the_time() -> None:
    silence = Silence()
    for total in range(100, 1000, 100):
        silence.total_ns = total
        assert silence.counted_ns(5000, 300) == total


def test_a_starved_one_is_excused_up_to_the_bound() -> None:
    silence = Silence()
    counted = []
    for total in range(100, 1000, 100):
        silence.total_ns = total
        counted.append(silence.counted_ns(50 * total, 300))
    assert counted == [100, 100, 100, 100, 200, 300, 400, 500, 600]


def test_of_a_while_of_silence_no_more_than_that_is_excused() -> None:
    silence = Silence()
    silence.total_ns = 100
    assert silence.counted_ns(1000, 300) == 100
    silence.total_ns = 200
    assert silence.counted_ns(1040, 300) == 160
    silence.total_ns = 300
    # Its threads were counted, and some of them have ended.
    assert silence.counted_ns(1000, 300) == 260


def test_the_bound_may_become_tighter_and_each_silence_has_its_own() -> None:
    silence = Silence()
    for total in (100, 400):
        silence.total_ns = total
        silence.counted_ns(total, 300)
    assert silence.counted_ns(400, 50) == 350
    silence.heard()
    silence.total_ns = 100
    assert silence.counted_ns(9000, 300) == 100
