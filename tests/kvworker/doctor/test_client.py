import subprocess
import sys

import pytest

from kvcommon.config import MooncakeConfig
from kvworker.doctor.client import become_client
from localmaster import LocalMaster


def test_a_master_takes_a_client_and_says_why_it_does_not() -> None:
    with LocalMaster() as master:
        assert become_client(MooncakeConfig(master_server_address=master.address)) == ""
        wrong = MooncakeConfig(master_server_address=master.address, protocol="nonsense")
        assert "'nonsense'" in become_client(wrong)
    assert "no Mooncake master answers" in become_client(wrong)


def test_a_client_that_hangs_or_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MooncakeConfig(master_server_address="127.0.0.1:1")

    def hang(command: list[str], **_options: object) -> None:
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "does not answer" in become_client(config)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "status 1" in become_client(config)
