import inspect

import pytest

from kvcommon import errors

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_ours_and_says_whose_fault(kind: type[errors.KVFerryError]) -> None:
    assert issubclass(kind, errors.KVFerryError)
    assert kind.__doc__


def test_a_peers_fault_is_not_ours() -> None:
    assert not issubclass(errors.RemoteProtocolError, errors.LocalProtocolError)
    assert not issubclass(errors.LocalProtocolError, errors.RemoteProtocolError)
