"""Questions that cannot be answered are answered in one line, with status 2."""

from pathlib import Path

import pytest
import typer

from kvreplay.asking import open_or_exit, wrong_questions
from kvreplay.plot import PlotError
from kvreplay.run import RunError
from kvreplay.story import NoSuchRequestError
from tests.kvreplay import scenes


def test_logs_are_opened(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.miss(scene)
    scene.close()
    assert len(open_or_exit([tmp_path]).logs) == 2


def test_no_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught:
        open_or_exit([tmp_path])
    assert caught.value.exit_code == 2
    assert "no event logs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        NoSuchRequestError("which one\x1b[2J?"),
        PlotError("nothing to draw"),
        RunError("no daemon"),
        FileNotFoundError(2, "No such file", "x.png"),
    ],
)
def test_errors_are_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, wrong_questions():
        raise error
    assert caught.value.exit_code == 2
    said = capsys.readouterr().err
    assert said.startswith("kvreplay: ")
    assert said.count("\n") == 1
    assert "\x1b" not in said


def test_other_errors_are_bugs_and_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), wrong_questions():
        raise ZeroDivisionError
