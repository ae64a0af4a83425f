from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvcommon.errors import LocalProtocolError
from kvworker.devices.cpu import CpuDevice
from kvworker.transfer.engine_memory import EngineMemory
from tests.kvworker.devices.layouts import NUM_BLOCKS, NUM_LAYERS, one_storage
from tests.kvworker.transfer.rig import Model


@pytest.fixture
def undone() -> list[str]:
    return []


@pytest.fixture
def memory(undone: list[str]) -> Iterator[EngineMemory]:
    model = Model(one_storage(), 1)
    mapping = CpuDevice("cpu:0").map(model.cache.handles)
    resources = ExitStack()
    resources.callback(mapping.close)
    resources.callback(undone.append, "undone")
    made = EngineMemory(mapping, model.cache.layout, model.page, resources)
    yield made
    made.close()
    model.close()


def test_it_knows_its_groups(memory: EngineMemory) -> None:
    assert memory.pieces(0).object_bytes == NUM_LAYERS * 96
    with pytest.raises(LocalProtocolError, match="no group 3"):
        memory.pieces(3)


def test_copies_outside_the_layout_are_refused(memory: EngineMemory) -> None:
    layers = (0, NUM_LAYERS)
    assert memory.pieces_for(0, layers, ["a"], [NUM_BLOCKS - 1]) is memory.pieces(0)
    for keys, blocks in ((["a"], [NUM_BLOCKS]), (["a"], []), ([], [1])):
        with pytest.raises(LocalProtocolError, match="outside the layout"):
            memory.pieces_for(0, layers, keys, blocks)
    with pytest.raises(LocalProtocolError, match="outside the layout"):
        memory.pieces_for(0, (0, NUM_LAYERS + 1), ["a"], [1])


def test_closing_lets_go_once(memory: EngineMemory, undone: list[str]) -> None:
    memory.close()
    memory.close()
    assert undone == ["undone"]
    assert not memory.gate.enter()
