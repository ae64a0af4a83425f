import msgspec

from kvcommon.layout import CacheLayout, GroupLayout, Layer, Plane


def plane(*segments: tuple[int, int]) -> Plane:
    return Plane(
        storage=0,
        dtype="torch.int8",
        shape=(4, 64),
        stride=(64, 1),
        offset=0,
        block_stride=64,
        segments=segments,
    )


def test_bytes_of_a_block_add_up() -> None:
    key, value = plane((0, 16), (32, 8)), plane((16, 4))
    first = Layer(name="first", planes=(key, value))
    second = Layer(name="second", planes=(value,))
    group = GroupLayout(group=0, block_size=4, num_blocks=4, layers=(first, second))
    assert (key.block_bytes, value.block_bytes) == (24, 4)
    assert (first.block_bytes, second.block_bytes) == (28, 4)
    assert group.object_bytes == 32


def test_a_layout_can_be_sent() -> None:
    layer = Layer(name="layer", planes=(plane((0, 64)),))
    group = GroupLayout(group=0, block_size=4, num_blocks=4, layers=(layer,))
    layout = CacheLayout(groups=(group,), storage_bytes=(256,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=CacheLayout) == layout
