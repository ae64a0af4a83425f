"""What is drawn, and that it is drawn."""

import builtins
from pathlib import Path
from typing import Any

import pytest

from kvreplay.plot import PlotError, StepTimes, collect, draw
from tests.kvreplay import scenes

MS = scenes.MS


def test_times_are_relative_to_the_begin_of_the_step(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.failed_load(scene)
    scenes.save(scene, tainted=True, publish=False)
    load, save = collect(scene.close())
    assert (load.step, load.loaded) == (5, [(2 * MS, 1), (3 * MS, 2)])
    assert load.finished_ns == 5 * MS
    assert (save.step, save.computed, save.written) == (6, [(2 * MS, 2)], [(3 * MS, 2)])
    assert save.finished_ns == 4 * MS


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    draw(collect(scene.close()), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_an_engine_is_not_taken_for_a_formula(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    step = StepTimes("$\\frac$#0", 1, 0, loaded=[(MS, 1)], written=[(MS, 1)])
    draw([step], tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    scenes.miss(scene)
    with pytest.raises(PlotError, match="no step"):
        draw(collect(scene.close()), tmp_path / "x.png")


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    scene = scenes.Scene(tmp_path)
    scenes.hit(scene)
    steps = collect(scene.close())
    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(PlotError, match=r"kvferry\[plot\]"):
        draw(steps, tmp_path / "x.png")
