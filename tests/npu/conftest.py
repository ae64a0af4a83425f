"""Tests that need torch_npu, over the CANN double or over CANN: ``make test-npu`` runs them."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def complaints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The double complains about broken rules that no error code shows."""
    path = tmp_path / "complaints"
    monkeypatch.setenv("CANN_DOUBLE_COMPLAINTS", str(path))
    monkeypatch.setenv("CANN_DOUBLE_RUN", str(tmp_path / "engines"))
    (tmp_path / "engines").mkdir()
    yield
    assert not path.exists(), path.read_text(encoding="utf-8")
