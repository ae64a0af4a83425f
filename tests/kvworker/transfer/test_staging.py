from collections.abc import Iterator

import pytest

from kvcommon.errors import HandleError
from kvworker.devices.base import HostStaging, MappedStorage
from kvworker.devices.pieces import GroupPieces
from kvworker.transfer.staging import Staging
from tests.kvworker.devices.layouts import NUM_LAYERS, one_storage
from tests.kvworker.transfer.rig import OddStore


@pytest.fixture
def pieces() -> GroupPieces:
    layout = one_storage()
    return GroupPieces(layout.groups[0], [MappedStorage(4096, layout.storage_bytes[0])])


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging(HostStaging(1000))
    yield made
    made.close()


def test_the_buffer_is_the_memory_that_it_was_given() -> None:
    memory = HostStaging(1000)
    staging = Staging(memory)
    assert (staging.address, staging.num_bytes) == (memory.address, 1000)
    staging.close()


def test_whole_objects_go_together_while_they_fit(staging: Staging, pieces: GroupPieces) -> None:
    rounds = list(staging.rounds(pieces, 0, NUM_LAYERS, 5))
    # 1000 bytes hold two objects of 384.
    assert rounds == [(0, 4, range(2)), (0, 4, range(2, 4)), (0, 4, range(4, 5))]


def test_layers_go_one_by_one_where_an_object_does_not_fit(pieces: GroupPieces) -> None:
    small = Staging(HostStaging(200))
    rounds = list(small.rounds(pieces, 1, 3, 3))
    assert rounds == [(1, 3, range(1)), (1, 3, range(1, 2)), (1, 3, range(2, 3))]
    rounds = list(small.rounds(pieces, 0, 3, 3))
    assert rounds == [(la, la + 1, part) for la in range(3) for part in (range(2), range(2, 3))]
    small.close()


def test_a_layer_that_is_larger_than_the_buffer_is_refused() -> None:
    small = Staging(HostStaging(95))
    with pytest.raises(HandleError, match=r"model\.layers\.0 has 96 bytes"):
        small.check_fits(one_storage())
    small.close()
    exact = Staging(HostStaging(96))
    exact.check_fits(one_storage())
    exact.close()


def test_it_is_registered_once_and_unregistered_at_the_end() -> None:
    store = OddStore()
    staging = Staging(HostStaging(1000))
    staging.register(store)
    staging.register(store)
    assert store.registered == {staging.address: 1000}
    staging.close()
    staging.close()
    assert store.registered == {}


def test_a_store_that_refuses_it_is_an_error(staging: Staging) -> None:
    store = OddStore()
    store.refuse_from = 0
    with pytest.raises(HandleError, match="ulimit -l"):
        staging.register(store)
