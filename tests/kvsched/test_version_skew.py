"""A daemon of the previous or the next wire version is refused in one clear line, on both sides."""

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcommon.errors import ConfigError
from kvcommon.messages import PROTOCOL_VERSION
from kvsched.core.events import DaemonReady
from kvsched.ranks import logger
from kvworker.ask import ask_status
from tests.kvsched.test_fencing import Listener
from tests.support.daemonproc import DaemonProcess, environment

#: ``kvworker`` as it will be, or was: the same but for its protocol version.
OTHER_RELEASE = """
import sys
version = int(sys.argv.pop(1))
import kvcommon.channel, kvworker.cli, kvworker.conversations, kvworker.serve
for module in list(sys.modules.values()):
    if hasattr(module, "PROTOCOL_VERSION"):
        module.PROTOCOL_VERSION = version
kvworker.cli.main()
"""
PATIENCE_S = 30


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_release_is_refused_in_one_line(
    tmp_path: Path, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", OTHER_RELEASE, str(version), "serve", "--device", "cpu:0"]
    command += ["--run-dir", str(tmp_path), "--store", "memory"]
    with (tmp_path / "stderr.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=environment())
    daemon = DaemonProcess(tmp_path, "cpu:0", process)
    logger.addHandler(caplog.handler)
    try:
        daemon.wait_ready()
        with caplog.at_level(logging.WARNING, logger=logger.name):
            listener = Listener(daemon.endpoint)
            deadline = time.monotonic() + PATIENCE_S
            while not caplog.records:
                assert time.monotonic() < deadline
                listener.ranks.wait(0, 50)
                listener.ranks.poll()
            for _ in range(20):
                listener.ranks.wait(0, 20)
                listener.ranks.poll()
            listener.ranks.close()
        (line,) = {record.getMessage() for record in caplog.records}
        assert f"protocol version {PROTOCOL_VERSION} is not {version}" in line
        assert "same release" in line
        assert "serves without the cache" in line
        assert not any(isinstance(event, DaemonReady) for event in listener.events)
        told = [line for line in daemon.log.splitlines() if "protocol version" in line]
        assert len(told) == 1
        with pytest.raises(ConfigError, match=f"speaks protocol version {version}"):
            ask_status(daemon.endpoint, PATIENCE_S)
        assert daemon.stop() == 0
    finally:
        logger.removeHandler(caplog.handler)
        process.kill()
        process.wait(PATIENCE_S)
