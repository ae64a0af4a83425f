"""Names, causes and headers of event logs."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcommon.errors import LocalProtocolError
from kvcommon.eventlog import format as fmt


class Config(msgspec.Struct, frozen=True, kw_only=True):
    width: int


@given(st.from_regex(fmt.NAME_PATTERN, fullmatch=True), st.integers(0, 10**9 - 1))
def test_file_name_round_trip(name: str, part: int) -> None:
    assert fmt.split_file_name(fmt.log_file_name(name, part)) == (name, part)


@given(st.from_regex(fmt.NAME_PATTERN, fullmatch=True), st.integers(0, 10**18 - 1))
def test_stimulus_round_trip(name: str, seq: int) -> None:
    assert fmt.parse_stimulus(fmt.stimulus(name, seq)) == (name, seq)


@pytest.mark.parametrize("text", ["", "a", "a:", ":3", "a:-1", "a:3x", "a/b:3", "a:1\n"])
def test_not_a_stimulus(text: str) -> None:
    assert fmt.parse_stimulus(text) is None


@pytest.mark.parametrize("text", ["a.kvlog", "a.0.kvlog.xz", ".0.kvlog", "a.x.kvlog", "a.0.log"])
def test_not_a_log_file(text: str) -> None:
    assert fmt.split_file_name(text) is None


def test_header_carries_config_and_clocks() -> None:
    header = fmt.make_header(
        "kvworker", "w-1", 7, Config(width=3), versions={"kvferry": "1"}, info={"engine": "e"}
    )
    assert msgspec.msgpack.decode(header.config, type=Config) == Config(width=3)
    assert header.epoch == 7
    assert header.wall_ns > header.mono_ns > 0
    assert header.info["engine"] == "e"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 121])
def test_header_refuses_names_that_are_no_file_names(name: str) -> None:
    with pytest.raises(LocalProtocolError):
        fmt.make_header("kvworker", name, 7, Config(width=3), versions={})


def test_checksum_depends_on_the_place() -> None:
    assert fmt.checksum(b"abc", 8) != fmt.checksum(b"abc", 9)
