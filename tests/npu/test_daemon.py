"""The whole daemon and the model side on a device: bytes equal, whatever the device's timing."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommon.messages import JobOutcome
from tests.conformance.devices.memory import DeviceProcess
from tests.npu.rig import Engine, adversarial, engine, engine_process, mapped_segments, npu_daemon
from tests.support.daemonproc import DaemonProcess

BLOCKS, INTO = [1, 2, 3, 7], [8, 9, 4, 5]


@pytest.fixture(scope="module", autouse=True)
def slow_device() -> Iterator[None]:
    with adversarial(seed=11, CANN_DOUBLE_LAUNCH_US="300"):
        yield


@pytest.fixture(scope="module")
def process(slow_device: None) -> Iterator[DeviceProcess]:
    with engine_process() as made:
        yield made


@pytest.fixture(scope="module")
def served(slow_device: None) -> Iterator[DaemonProcess]:
    with npu_daemon() as made:
        yield made


def round_trip(one: Engine, seed: int, step: int = 1) -> None:
    """Save in one step, load layer by layer in the next, load between steps after that."""
    end = one.save(step, seed, BLOCKS)
    assert (end.outcome, end.num_bytes) == (JobOutcome.DONE, 4 * one.object_bytes)
    want = [one.content(seed, block) for block in BLOCKS]
    assert one.hits(step, seed, BLOCKS) == 4
    # An earlier step still writes into the blocks that are loaded.
    one.process.ask("scribble", 99, INTO)
    seen, end = one.load(step + 1, seed, BLOCKS, INTO)
    assert end.outcome is JobOutcome.DONE
    assert seen == want
    one.process.ask("scribble", 98, INTO)
    assert one.load_async(step + 2, seed, BLOCKS, INTO).outcome is JobOutcome.DONE
    assert one.process.ask("blocks", INTO) == want


@pytest.mark.parametrize("cache", ["gqa", "mla", "sfa", "strided", "hybrid"])
def test_what_was_computed_comes_back(
    cache: str, served: DaemonProcess, process: DeviceProcess
) -> None:
    with engine(served, cache, process) as one:
        assert set(one.attach()) == {"staging", "events"}
        round_trip(one, seed=10)
        assert mapped_segments(served.pid) > 0
        # Frees its memory once the daemon has let go of it: the double complains otherwise.
        one.leave()
        assert mapped_segments(served.pid) == 0


def test_a_killed_engine_leaves_nothing_mapped_and_the_next_one_starts_warm(
    served: DaemonProcess, process: DeviceProcess
) -> None:
    with engine_process() as doomed:
        first = Engine(served, "gqa", doomed, name="doomed")
        first.attach()
        assert first.save(1, 20, BLOCKS).outcome is JobOutcome.DONE
        assert mapped_segments(served.pid) > 0
        doomed.kill()
        assert first.scheduler is not None
        while first.scheduler.hear_anything() is None or mapped_segments(served.pid):
            pass
        first.scheduler.close()
        # Nor does it leave torch's counters, which only their maker removes.
        while list(Path("/dev/shm").glob(f"torch_{doomed.process.pid}_*")):
            pass
    with engine(served, "gqa", process, name="next") as second:
        second.attach()
        assert second.hits(1, 20, BLOCKS) == 4
        seen, _ = second.load(1, 20, BLOCKS, INTO)
        assert seen == [second.content(20, block) for block in BLOCKS]


def test_a_killed_daemon_is_replaced_and_the_engine_attaches_again(
    process: DeviceProcess,
) -> None:
    with npu_daemon() as first:
        one = Engine(first, "mla", process)
        one.attach()
        assert one.save(1, 30, BLOCKS).outcome is JobOutcome.DONE
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        first.socket_path.unlink()
        first.descriptor_path.unlink()
        with npu_daemon(directory=first.directory):
            one.attach()
            round_trip(one, seed=31, step=5)
            one.leave()


def test_two_ranks_on_two_cards(served: DaemonProcess, process: DeviceProcess) -> None:
    with (
        npu_daemon(number=1) as other,
        engine_process(index=1) as card,
        engine(served, "gqa", process, name="tp", rank=0) as left,
        engine(other, "gqa", card, name="tp", rank=1) as right,
    ):
        left.attach()
        right.attach()
        assert left.fingerprint != right.fingerprint
        round_trip(left, seed=40)
        round_trip(right, seed=41)


def test_an_engine_on_another_card_is_refused(served: DaemonProcess) -> None:
    with engine_process(index=1) as card:
        wrong = Engine(served, "gqa", card, name="wrong")
        assert "serves npu:0, not npu:1" in wrong.process.ask("refusal")
        wrong.process.ask("leave")
    assert mapped_segments(served.pid) == 0


def test_without_events_the_engine_waits_itself(process: DeviceProcess) -> None:
    with (
        adversarial(seed=12, CANN_DOUBLE_IPC_EVENTS="0"),
        engine_process() as poor,
        npu_daemon() as plain,
        engine(plain, "gqa", poor) as one,
    ):
        assert one.attach() == ("staging",)
        round_trip(one, seed=50)
