"""The descriptor is whole or absent."""

from pathlib import Path

import msgspec
import pytest

from kvcommon.errors import ConfigError
from kvworker.descriptor import Descriptor, descriptor_path, read_descriptor, write_descriptor

WRITTEN = Descriptor(
    device="npu:3", pid=5, epoch="ff", endpoint="ipc:///r/npu-3.sock", version="1", protocol=1
)


def test_lies_beside_the_socket_or_in_the_run_directory() -> None:
    run = Path("/r")
    assert descriptor_path(run, "npu:3", "ipc:///s/npu-3.sock") == Path("/s/npu-3.json")
    assert descriptor_path(run, "npu:3", "tcp://127.0.0.1:5") == Path("/r/npu-3.json")


def test_reads_what_was_written_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "npu-3.json"
    write_descriptor(path, WRITTEN)
    assert read_descriptor(path) == WRITTEN
    assert list(tmp_path.iterdir()) == [path]
    assert msgspec.json.decode(path.read_bytes())["endpoint"] == "ipc:///r/npu-3.sock"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"device": 3}'])
def test_nonsense_reads_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "d.json"
    path.write_bytes(content)
    assert read_descriptor(path) is None
    assert read_descriptor(tmp_path / "absent.json") is None


def test_unwritable_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        write_descriptor(tmp_path / "absent" / "d.json", WRITTEN)
