"""``diff`` and ``run`` on the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvreplay.cli import app
from tests.kvreplay.drive.recording import record
from tests.kvreplay.pair import Pair


def call(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, args)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recording")
    record(directory)
    return directory


def test_run_prints_what_came_of_it(recording: Path) -> None:
    status, out, _ = call("run", recording, "--limit", 60)
    assert status == 0, out
    assert "8 outcomes as recorded, 0 not" in out
    assert "6 blocks compared, 2 of them read back" in out
    assert "LoadLayers p50" in out


def test_run_of_one_request_as_json(recording: Path) -> None:
    status, out, _ = call("run", recording, "--only", "load-2", "--json", "--limit", 60)
    assert status == 0
    read = json.loads(out)
    assert (read["status"], read["differences"], read["num_seeded"]) == (0, [], 2)
    assert read["num_same"] == 2
    assert call("run", recording, "--only", "nobody")[0] == 2


def test_diff(tmp_path: Path) -> None:
    for name, texts in (("a", "aa"), ("b", "ab")):
        pair = Pair(tmp_path / name)
        for number, text in enumerate(texts):
            pair.serve(f"r{number}", 100, text, step=3 * number + 1, first_block=10)
        pair.close()
    status, out, _ = call("diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    for text in ("1 of 2 requests went another way", "A: Request r1 took 96", "its records part"):
        assert text in out
    status, out, _ = call("diff", tmp_path / "a", tmp_path / "a", "--json")
    assert (status, json.loads(out)["first"]) == (0, None)
    status, out, _ = call("diff", tmp_path / "a", tmp_path / "a")
    assert "2 requests went the same way" in out
