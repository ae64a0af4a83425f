import pytest

from kvcommon.errors import DeviceError
from kvworker.devices.driver import Library, event_handle


def test_a_library_that_is_missing_is_named() -> None:
    with pytest.raises(DeviceError, match=r"libnothing\.so\.7 cannot be loaded"):
        Library("libnothing.so.7")


def test_a_function_that_is_missing_or_fails_is_named() -> None:
    library = Library("libc.so.6")
    with pytest.raises(DeviceError, match="no aclrtNothing: install a newer one"):
        library.call("aclrtNothing")
    with pytest.raises(DeviceError, match="abs failed with code 5"):
        library.call("abs", -5)
    library.call("abs", 0)
    assert library.has("abs")
    assert not library.has("aclrtNothing")


def test_a_handle_of_an_event_has_its_size() -> None:
    assert bytes(event_handle(bytes(range(64)))) == bytes(range(64))
    with pytest.raises(DeviceError, match="3 bytes"):
        event_handle(b"abc")
