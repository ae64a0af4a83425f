"""``run`` as a whole: what it finds, what it keeps, what it says."""

import json
from pathlib import Path

import pytest

from kvreplay.loading import LogSet, open_logs
from kvreplay.run import RunError, Wishes, run
from kvreplay.verify import verify
from localmaster import LocalMaster
from tests.e2e.stack import mooncake_file
from tests.kvreplay import scenes
from tests.kvreplay.drive.recording import record

HISTORIES = Path(__file__).parents[1] / "histories"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> LogSet:
    return record(tmp_path_factory.mktemp("recording"))


def test_a_recording_is_reproduced_and_the_new_logs_are_kept(
    recording: LogSet, tmp_path: Path
) -> None:
    report = run(recording, Wishes(limit_s=60, answer_s=10, out=tmp_path / "new"))
    assert report.status == 0, report.plain()
    assert report.is_sound
    assert (report.num_same, report.num_checked) == (8, 6)
    assert verify(open_logs([tmp_path / "new"])).status == 0
    names = {row.name for row in report.rows}
    assert {"LoadLayers p50", "saved"} <= names
    read = json.loads(json.dumps(report.plain()))
    assert read["timings"][0].keys() == {"name", "recorded", "now", "change"}


def test_an_outcome_that_differs_is_status_1(recording: LogSet) -> None:
    report = run(recording, Wishes(limit_s=60, answer_s=10, memory_limit="16B"))
    assert report.status == 1
    assert "job 1 of e#0: recorded done; now failed, 2 blocks not (store-full)" in (
        report.differences
    )


def test_what_cannot_be_played_is_an_error_in_words(recording: LogSet, tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    scene.close()
    (tmp_path / f"{scenes.WORKER}.0.kvlog").unlink()
    with pytest.raises(RunError, match="no log of a daemon"):
        run(open_logs([tmp_path]), Wishes())
    with pytest.raises(RunError, match="does not start"):
        run(recording, Wishes(mooncake_config=str(tmp_path / "none.json")))


@pytest.mark.parametrize(
    ("name", "num_same", "num_audited"),
    [
        ("mooncake", 12, 10),
        ("asynchronous", 12, 10),
        ("two-ranks", 12, 10),
        ("one-of-two-daemons-killed", 15, 8),
        ("daemon-killed-in-save", 11, 2),
        ("engine-killed-in-save", 8, 4),
    ],
)
def test_a_run_of_a_real_engine_is_reproduced_against_a_real_mooncake(
    name: str, num_same: int, num_audited: int, tmp_path: Path
) -> None:
    logs = open_logs([HISTORIES / "real" / name])
    lease_ms = 1000
    with LocalMaster(f"--default_kv_lease_ttl={lease_ms}") as master:
        path = mooncake_file(tmp_path, master.address)
        plain = {**json.loads(path.read_text()), "store_lease_ms": lease_ms}
        path.write_text(json.dumps(plain))
        report = run(logs, Wishes(mooncake_config=str(path), limit_s=100))
    assert report.status == 0, report.plain()
    assert report.num_same >= num_same
    assert report.num_checked > 0
    assert report.num_audited >= num_audited
    assert report.num_removed >= report.num_audited
    assert report.plain()["num_removed"] == report.num_removed
