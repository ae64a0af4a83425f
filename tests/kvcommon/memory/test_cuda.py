import sys

import pytest

from kvcommon.errors import HandleError
from kvcommon.memory import cuda


def test_plain_keys_are_taken() -> None:
    cuda.check_key(bytes(64))
    cuda.check_key(b"\x01c" + bytes(64))


@pytest.mark.parametrize("key", [b"", b"\x01e" + bytes(64), b"\x02c" + bytes(64), bytes(200)])
def test_other_keys_are_refused(key: bytes) -> None:
    with pytest.raises(HandleError, match="expandable_segments:False"):
        cuda.check_key(key)


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(HandleError, match=r"pip install 'kvferry\[cuda\]'"):
        cuda.runtime()
