from pathlib import Path

import pytest

from kvworker.doctor.host import check_host
from kvworker.doctor.report import Finding, Surroundings, Verdict


def examined(tmp_path: Path, **environ: str) -> dict[str, Finding]:
    around = Surroundings({"KVFERRY_RUN_DIR": str(tmp_path / "run"), **environ}, tmp_path)
    return {each.name: each for each in check_host(around)}


def test_a_machine_without_shared_memory_cannot_serve(tmp_path: Path) -> None:
    found = examined(tmp_path)["/dev/shm"]
    assert found.verdict is Verdict.FAIL
    assert "--ipc=host" in found.remedy


def test_enough_shared_memory_is_fine(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert examined(tmp_path)["/dev/shm"].verdict is Verdict.OK


def test_dockers_default_is_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Surroundings, "free_bytes", lambda *_: 64 << 20)
    assert examined(tmp_path)["/dev/shm"].verdict is Verdict.WARN


@pytest.mark.parametrize(
    ("seed", "verdict"), [("0", Verdict.OK), ("", Verdict.WARN), ("random", Verdict.WARN)]
)
def test_block_hashes_must_agree(tmp_path: Path, seed: str, verdict: Verdict) -> None:
    assert examined(tmp_path, PYTHONHASHSEED=seed)["PYTHONHASHSEED"].verdict is verdict


def test_a_run_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    assert examined(tmp_path)["run directory"].verdict in {Verdict.OK, Verdict.FAIL}
    path.chmod(0o777)
    assert examined(tmp_path)["run directory"].verdict is Verdict.FAIL
