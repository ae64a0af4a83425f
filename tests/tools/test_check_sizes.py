from pathlib import Path

import pytest

import check_sizes

BODY = "def act() -> int:\n    return 1\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_sizes, "NO_MIRROR", {})
    return tmp_path


def write(root: Path, name: str, text: str = "") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def found(root: Path) -> list[str]:
    return [f"{where}: {what}" for where, what in check_sizes.complaints(root)]


def test_nothing_to_complain_about(root: Path) -> None:
    write(root, "kvworker/core/jobs.py", BODY)
    write(root, "tests/kvworker/core/test_jobs.py", BODY)
    write(root, "tools/demo.py", BODY)
    assert found(root) == []
    assert check_sizes.main([str(root)]) == 0


def test_limits_are_exact(root: Path) -> None:
    write(root, "tools/fits.py", "\n" * 400)
    write(root, "tools/long.py", "\n" * 401)
    fits = "def fits() -> None:\n" + "    x = 1\n" * 69
    too_long = "@staticmethod\nasync def too_long() -> None:\n" + "    x = 1\n" * 70
    write(root, "benchmarks/bench.py", fits + too_long)
    assert found(root) == [
        "tools/long.py: 401 lines, more than 400",
        "benchmarks/bench.py:72: too_long has 71 lines, more than 70",
    ]
    assert check_sizes.main([str(root)]) == 1


@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("common/kvcommon/keys.py", "tests/kvcommon/test_keys.py"),
        ("common/kvcommon/eventlog/__init__.py", "tests/kvcommon/test_eventlog.py"),
        ("kvsched/core/core.py", "tests/kvsched/core/test_core.py"),
        ("kvworker/__init__.py", "tests/kvworker/test_init.py"),
        ("kvworker/__main__.py", "tests/kvworker/test_main.py"),
        ("tools/kvreplay/cli.py", "tests/kvreplay/test_cli.py"),
    ],
)
def test_a_module_with_code_has_its_test_file(root: Path, module: str, test: str) -> None:
    write(root, module, BODY)
    assert found(root) == [f"{module}: has no {test}"]
    write(root, test)
    assert found(root) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "X = 1\n",
        "class Error(Exception):\n    '''Bad.'''\n",
        "class Base:\n    def act(self) -> int:\n        '''Do it.'''\n",
        "class Base:\n    def act(self) -> int: ...\n",
        "def act() -> None:\n    pass\n",
    ],
)
def test_a_module_without_code_needs_none(root: Path, text: str) -> None:
    write(root, "kvsched/events.py", text)
    assert found(root) == []


def test_an_exemption_must_be_needed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exempt = {"kvsched/base.py": "an interface", "kvsched/gone.py": "an interface"}
    monkeypatch.setattr(check_sizes, "NO_MIRROR", exempt)
    write(root, "kvsched/base.py", BODY)
    assert found(root) == [
        "kvsched/gone.py: is exempted from having a test file, but needs no exemption"
    ]
