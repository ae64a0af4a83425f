"""Synthetic bytes: the same for the same, another for everything else."""

from kvreplay.drive.content import layer_bytes, poison


def test_bytes_are_a_function_of_seed_object_and_layer() -> None:
    one = layer_bytes(0, "key", 3, 512)
    assert one == layer_bytes(0, "key", 3, 512)
    others = [layer_bytes(1, "key", 3, 512), layer_bytes(0, "kez", 3, 512)]
    others += [layer_bytes(0, "key", 4, 512), poison(512)]
    assert len({one, *others}) == 5
    assert len(one) == 512


def test_no_part_of_a_layer_looks_like_another() -> None:
    data = layer_bytes(0, "key", 0, 4096)
    parts = {data[at : at + 64] for at in range(0, 4096, 64)}
    assert len(parts) == 64
