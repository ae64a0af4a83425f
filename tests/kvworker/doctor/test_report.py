from pathlib import Path

from kvworker.doctor.report import Surroundings, Verdict, fail, ok, warn


def test_findings_say_how_bad_it_is() -> None:
    assert ok("a", "b").verdict is Verdict.OK
    assert warn("a", "b", "c").remedy == "c"
    assert fail("a", "b", "c").verdict is Verdict.FAIL


def test_files_are_looked_up_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/x").write_text("text", encoding="utf-8")
    around = Surroundings({}, tmp_path)
    assert around.read("/etc/x") == "text"
    assert not around.read("/etc/y")
    assert around.free_bytes("/etc") > 0
    assert around.free_bytes("/nowhere") == 0
