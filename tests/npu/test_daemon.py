"""The whole daemon and the model side on a device: bytes equal, whatever the device's timing."""

import pytest

from kvcommon.messages import JobOutcome
from tests.npu.rig import adversarial, engine, mapped_segments, npu_daemon

BLOCKS, INTO = [1, 2, 3, 7], [8, 9, 4, 5]


@pytest.mark.parametrize("cache", ["gqa", "mla", "sfa", "strided", "hybrid"])
def test_what_was_computed_comes_back(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in adversarial(seed=len(cache)).items():
        monkeypatch.setenv(name, value)
    with npu_daemon() as served, engine(served, cache) as one:
        assert set(one.attach()) == {"staging", "events"}
        end = one.save(1, 10, BLOCKS)
        assert (end.outcome, end.num_bytes) == (JobOutcome.DONE, 4 * one.object_bytes)
        want = [one.content(10, block) for block in BLOCKS]
        assert one.hits(1, 10, BLOCKS) == 4
        # An earlier step still writes into the blocks that are loaded.
        one.process.ask("scribble", 99, INTO)
        seen, end = one.load(2, 10, BLOCKS, INTO)
        assert end.outcome is JobOutcome.DONE
        assert seen == want
        one.process.ask("scribble", 98, INTO)
        end = one.load_async(3, 10, BLOCKS, INTO)
        assert end.outcome is JobOutcome.DONE
        assert one.process.ask("blocks", INTO) == want
        assert mapped_segments(served.pid) > 0
        # Frees its memory once the daemon has let go of it: the double complains otherwise.
        one.process.ask("leave")
        assert mapped_segments(served.pid) == 0
