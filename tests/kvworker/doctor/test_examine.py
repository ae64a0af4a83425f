from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvworker.cli import app
from kvworker.doctor.examine import examine
from kvworker.doctor.report import Finding, Surroundings, Verdict


def names(findings: list[Finding]) -> list[str]:
    return [each.name for each in findings]


def test_a_cpu_needs_nothing_of_ascend(tmp_path: Path) -> None:
    around = Surroundings({"KVFERRY_RUN_DIR": str(tmp_path)}, device="cpu:0")
    found = examine(around, mooncake=False, mooncake_file="", probe=True)
    assert "/dev/shm" in names(found)
    assert "CANN" not in names(found)
    assert "Mooncake" not in names(found)


def test_an_npu_is_not_opened_unless_its_software_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch_npu", None)
    around = Surroundings({"MOONCAKE_MASTER": "127.0.0.1:1"}, tmp_path, device="npu:0")
    found = examine(around, mooncake=True, mooncake_file="", probe=True)
    (card,) = [each for each in found if each.name == "card"]
    assert card.verdict is Verdict.SKIP
    assert "lease" not in names(found), "the protocol is tcp"


def test_the_command_says_what_is_wrong_and_what_to_do() -> None:
    result = CliRunner().invoke(
        app, ["doctor", "--device", "npu:0", "--store", "memory", "--no-probe"]
    )
    assert result.exit_code == 1
    assert "FAIL  driver: /usr/local/Ascend/driver/version.info is not there" in result.output
    assert "set_env.sh" in result.output
