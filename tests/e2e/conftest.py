"""Real vLLM engines (CPU), a real Mooncake master, real daemons: what e2e tests stand on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from localmaster import LocalMaster
from tests.e2e.engines import EngineProcess
from tests.e2e.stack import Stack, mooncake_file
from tinymodel import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def master() -> Iterator[LocalMaster]:
    with LocalMaster() as running:
        yield running


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine without a connector; ``generate`` after ``call('reset')`` is a cold run."""
    with EngineProcess(model, tmp_path_factory.mktemp("reference") / "engine.log") as engine:
        yield engine


@pytest.fixture(scope="module")
def stack(
    model: Path, master: LocalMaster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """One daemon for cpu:0 on the real Mooncake, with its own run directory and event log."""
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder, model, mooncake_file(folder, master.address)) as running:
        yield running
