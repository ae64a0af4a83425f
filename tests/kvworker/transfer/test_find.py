from collections.abc import Iterator

import pytest

from kvcommon.messages import StoreState
from kvworker.core.commands import FindKeys, ProbeStore, ResetNamespace
from kvworker.core.events import KeysFound, StoreProbed, StoreReset
from kvworker.outcome import Outcome
from tests.kvworker.devices.layouts import one_storage
from tests.kvworker.transfer.rig import OK, OddStore, Rig, rig_with


@pytest.fixture
def saved() -> Iterator[tuple[Rig, OddStore]]:
    with rig_with(one_storage()) as (rig, store, _):
        rig.save(["n-a", "n-b", "m-a"], [1, 2, 3])
        yield rig, store


def find(rig: Rig, keys: tuple[str, ...]) -> KeysFound:
    answer = rig.ask(FindKeys(op=next(rig.ops), engine="anything", keys=keys))
    assert isinstance(answer, KeysFound)
    return answer


def test_found_and_missing_keys_are_told_apart(saved: tuple[Rig, OddStore]) -> None:
    rig, _ = saved
    answer = find(rig, ("n-a", "x", "n-b"))
    assert answer.outcomes == (OK, Outcome.MISS, OK)
    assert answer.local


def test_nothing_found_is_not_local(saved: tuple[Rig, OddStore]) -> None:
    rig, _ = saved
    assert not find(rig, ("x",)).local
    assert not find(rig, ()).local


def test_a_store_that_raises_is_down_and_no_miss(saved: tuple[Rig, OddStore]) -> None:
    rig, store = saved
    store.raises.add("find")
    assert find(rig, ("n-a", "x")).outcomes == (Outcome.DOWN,) * 2


def test_a_namespace_is_removed(saved: tuple[Rig, OddStore]) -> None:
    rig, _ = saved
    answer = rig.ask(ResetNamespace(op=next(rig.ops), prefixes=("n-", "z-")))
    assert isinstance(answer, StoreReset)
    assert answer.num_removed == 2
    assert find(rig, ("n-a", "m-a")).outcomes == (Outcome.MISS, OK)


def test_a_probe_says_how_the_store_is(saved: tuple[Rig, OddStore]) -> None:
    rig, store = saved
    answer = rig.ask(ProbeStore(op=next(rig.ops)))
    assert isinstance(answer, StoreProbed)
    assert answer.state is StoreState.UP
    store.close()
    answer = rig.ask(ProbeStore(op=next(rig.ops)))
    assert isinstance(answer, StoreProbed)
    assert answer.state is StoreState.DOWN
