import sys

import pytest

from kvcommon.errors import HandleError
from kvcommon.memory import npu

GOOD = b"\x01c" + bytes(65)


def test_a_plain_key_is_taken() -> None:
    npu.check_key(GOOD)


@pytest.mark.parametrize(
    "key", [b"", b"\x01", GOOD[:-1], GOOD + b"x", b"\x02" + GOOD[1:], bytes(67)]
)
def test_a_key_that_is_not_known_is_refused(key: bytes) -> None:
    with pytest.raises(HandleError, match="not one that is known"):
        npu.check_key(key)


def test_an_expandable_segment_is_refused_with_what_to_set() -> None:
    with pytest.raises(HandleError, match="PYTORCH_NPU_ALLOC_CONF=expandable_segments:False"):
        npu.check_key(b"\x01e" + bytes(24))


def test_without_torch_npu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(HandleError, match=r"pip install 'kvferry\[npu\]'"):
        npu.runtime()


def test_the_visible_devices_tell_the_card_where_the_runtime_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_name: str) -> None:
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", missing)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5, 7")
    assert [npu.physical_id(index) for index in (0, 1, 2)] == [5, 7, 2]


@pytest.mark.parametrize(
    ("told", "uuid"),
    [
        ("00000000-0000-0000-0000-000000000000", b""),
        (bytes(16), b""),
        ("", b""),
        ("0102", b"\x01\x02"),
        (b"\x09" * 16, b"\x09" * 16),
    ],
)
def test_a_uuid_of_zeros_is_none(
    told: object, uuid: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        pass

    class Runtime:
        def get_device_properties(self, _index: int) -> Properties:
            found = Properties()
            found.uuid = told  # type: ignore[attr-defined]
            return found

    monkeypatch.setattr(npu, "runtime", Runtime)
    assert npu._uuid(0) == uuid
