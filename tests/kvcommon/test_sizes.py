import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcommon.errors import ConfigError
from kvcommon.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("17 b", 17),
        ("4GB", 4_000_000_000),
        ("4 GB", 4_000_000_000),
        (" 4gb ", 4_000_000_000),
        ("4g", 4_000_000_000),
        ("2k", 2_000),
        ("2KB", 2_000),
        ("3m", 3_000_000),
        ("1t", 10**12),
        ("1TB", 10**12),
        ("1KiB", 1024),
        ("1Ki", 1024),
        ("2MiB", 2 << 20),
        ("4GiB", 4 << 30),
        ("1TiB", 1 << 40),
        ("1.5GiB", 3 << 29),
        (".5KiB", 512),
        ("2.k", 2000),
        (4096, 4096),
        (4096.9, 4096),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_sizes(text: str | float, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "4 XB",
        "4GBs",
        "-1",
        "-1GB",
        "4iB",
        "4i",
        "1e9",
        "nan",
        "inf",
        "1,5GB",
        "4 G B",
        "٤GB x",
        "9223372036854775808",
        "10000000000 GiB",
        -1,
        float("nan"),
        float("inf"),
        1e300,
        True,
        None,
        [4],
    ],
)
def test_what_is_no_size(text: str | float) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


@given(st.integers(0, (1 << 63) - 1))
def test_plain_numbers_are_bytes(size: int) -> None:
    assert parse_size(str(size)) == size
    assert parse_size(size) == size


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        size = parse_size(text)
    except ConfigError:
        return
    assert 0 <= size < 1 << 63
