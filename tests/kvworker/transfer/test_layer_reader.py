from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvworker.core.commands import LoadLayers
from kvworker.devices.cpu import CpuDevice
from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO
from kvworker.transfer.engine_memory import EngineMemory
from kvworker.transfer.layer_reader import LayerReader
from tests.kvworker.devices.layouts import NUM_LAYERS, layers_in_block
from tests.kvworker.transfer.rig import OK, Model, OddStore

LAYER_BYTES = 96
KEYS = ("here", "there", "gone")


@pytest.fixture
def store() -> OddStore:
    return OddStore()


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model(layers_in_block(), 1)
    yield made
    made.close()


@pytest.fixture
def reader(store: OddStore, model: Model) -> Iterator[LayerReader]:
    """Three objects open for reading, equal to blocks 1 to 3; they go to blocks 4 to 6."""
    device = CpuDevice("cpu:0")
    mapping = device.map(model.cache.handles)
    memory = EngineMemory(mapping, model.cache.layout, model.page, ExitStack())
    pieces = memory.pieces(0)
    span = pieces.span(0, NUM_LAYERS)
    store.put_start(KEYS, [pieces.object_bytes] * 3)
    store.put_ranges(
        [
            RangeIO(key, span.addresses(block), span.sizes, span.offsets)
            for block, key in enumerate(KEYS, 1)
        ]
    )
    store.put_end(KEYS)
    store.get_start(KEYS)
    made = LayerReader(device, store, memory, pieces, staging=None, layers_per_read=2)
    yield made
    mapping.close()


COMMAND = LoadLayers(
    op=1,
    engine="e",
    step=1,
    group=0,
    keys=KEYS,
    block_ids=(4, 5, 6),
    first_layer=0,
    end_layer=NUM_LAYERS,
)


def test_local_and_remote_objects_are_read_side_by_side(
    reader: LayerReader, store: OddStore, model: Model
) -> None:
    # The first key is local, then nothing is any more.
    store.lose_local = True
    reader.start(COMMAND)
    store.lose_local = store.hide_local = False
    reader.read(0)
    # The local one layer by layer, the others two layers at a time.
    assert reader.num_bytes == LAYER_BYTES * (1 + 2 * 2)
    assert model.cache.block(5, range(2)) == model.cache.block(2, range(2))
    assert model.cache.block(4, range(1)) == model.cache.block(1, range(1))
    assert model.cache.block(4, range(1, 2)) != model.cache.block(1, range(1, 2))
    for layer in range(1, NUM_LAYERS):
        reader.read(layer)
    reader.verify_local()
    assert reader.outcomes == [OK, OK, OK]
    assert reader.num_bytes == 3 * NUM_LAYERS * LAYER_BYTES
    for block in (1, 2, 3):
        assert model.cache.block(block + 3) == model.cache.block(block)


def test_cancelling_keeps_what_is_known_of_failed_keys(
    reader: LayerReader, store: OddStore
) -> None:
    store.hide_local = True
    store.bad_keys.add("gone")
    reader.start(COMMAND)
    reader.read(0)
    before = reader.alive
    reader.cancel()
    assert (before, reader.alive) == (True, False)
    assert reader.outcomes == [Outcome.CANCELLED, Outcome.CANCELLED, Outcome.FAILED]


def test_a_load_dies_with_its_last_key(reader: LayerReader, store: OddStore) -> None:
    store.hide_local = True
    store.bad_keys.update(KEYS)
    reader.start(COMMAND)
    reader.read(0)
    assert not reader.alive
    assert reader.num_bytes == 0


def test_only_local_objects_are_verified(reader: LayerReader, store: OddStore) -> None:
    reader.start(COMMAND)
    store.get_end(["gone"])
    reader.read(0)
    reader.verify_local()
    assert reader.outcomes == [OK, OK, Outcome.EXPIRED]
