"""Every layout that vLLM and vllm-ascend hand out, described and checked byte by byte."""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch

from kvcommon.describe import GroupSpec, describe_cache, layout_digest
from kvcommon.errors import ConfigError
from kvcommon.layout import CacheLayout, Plane

L, B, H, N, D = 3, 10, 2, 4, 8
NAMES = tuple(f"model.layers.{i}.attn" for i in range(L))
Caches = dict[str, Any]
MiB = 1 << 20


def group(
    names: Sequence[str] = NAMES,
    *,
    number: int = 0,
    block_size: int = N,
    num_blocks: int = B,
) -> GroupSpec:
    return GroupSpec(number, block_size, num_blocks, names)


def per_layer(make: Callable[[], Any]) -> Caches:
    return {name: make() for name in NAMES}


def permuted(sizes: Mapping[str, int], physical: str, logical: str) -> torch.Tensor:
    """A dense buffer of dimension order ``physical``, seen in the order ``logical``."""
    buffer = torch.zeros([sizes[dim] for dim in physical])
    return buffer.permute([physical.index(dim) for dim in logical])


def one_buffer(physical: str) -> Caches:
    """All layers in one buffer: vLLM's layouts since 0.29."""
    sizes = {"L": L, "B": B, "H": H, "N": N, "C": 2 * D}
    whole = permuted(sizes, physical, "LBHNC")
    return {name: whole[i] for i, name in enumerate(NAMES)}


def aligned(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """As vllm-ascend allocates: 2 MiB too much, cut to a 2 MiB boundary, then typed."""
    item = torch.empty((), dtype=dtype).element_size()
    num_bytes = item * torch.Size(shape).numel()
    raw = torch.zeros(num_bytes + 2 * MiB, dtype=torch.int8)
    start = -raw.data_ptr() % (2 * MiB) or 64
    return raw[start : start + num_bytes].view(dtype).view(shape)


def ascend_pair() -> tuple[torch.Tensor, torch.Tensor]:
    return aligned((B, N, H, D)), aligned((B, N, H, D // 2))


def padded() -> torch.Tensor:
    """A page that is larger than its block (``page_size_padded``)."""
    return torch.zeros(B, H * N * 2 * D + 24)[:, : H * N * 2 * D].view(B, H, N, 2 * D)


def page_views() -> list[torch.Tensor]:
    """Block-strided views of one raw page buffer, of different dtypes (compressed caches)."""
    pages = torch.zeros(B, 512, dtype=torch.int8)
    state = pages[:, :128].view(torch.float32).view(B, N, D)
    scale = pages[:, 192:256].view(torch.bfloat16).view(B, N, 8)
    return [state, scale]


def shared_raw() -> tuple[Caches, list[GroupSpec]]:
    """Attention and state layers as plane-major slices of one storage (hybrid models on Ascend)."""
    raw = torch.zeros(B * 640 + 96, dtype=torch.int8)[96:]
    attention = tuple(
        raw[start : start + B * 256].view(torch.float32).view(B, N, H, D)
        for start in (B * 128, B * 384)
    )
    state = [
        raw[: B * 128].view(torch.float32).view(B, 4, D),
        raw[B * 128 : B * 384].view(torch.float32).view(B, 64),
    ]
    specs = [group(["attn"]), group(["mamba"], number=1, block_size=512)]
    return {"attn": attention, "mamba": state}, specs


def overlaid() -> tuple[Caches, list[GroupSpec]]:
    """Two groups that lie over the same bytes of one buffer (hybrid models on vLLM since 0.29)."""
    first = one_buffer("LBHNC")
    second = {f"window.{i}": tensor for i, tensor in enumerate(first.values())}
    return {**first, **second}, [group(), group(list(second), number=1)]


LAYOUTS: dict[str, tuple[Caches, list[GroupSpec]]] = {
    "cpu, one storage": (one_buffer("LBHNC"), [group()]),
    "cpu, one per layer": (per_layer(lambda: torch.zeros(B, H, N, 2 * D)), [group()]),
    "[B, 2, N, H, D]": (per_layer(lambda: torch.zeros(B, 2, N, H, D)), [group()]),
    "[B, 2, N, H, D], heads outside tokens": (
        per_layer(lambda: torch.zeros(B, 2, H, N, D).permute(0, 1, 3, 2, 4)),
        [group()],
    ),
    "[2, B, N, H, D]": (per_layer(lambda: torch.zeros(2, B, N, H, D)), [group()]),
    **{
        order: (one_buffer(order), [group()])
        for order in ("LBNHC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
    },
    "latent, 3 dimensions": (per_layer(lambda: torch.zeros(B, N, 72)), [group()]),
    "latent, 4 dimensions": (per_layer(lambda: torch.zeros(B, 1, N, 72)), [group()]),
    "kernel blocks": (per_layer(lambda: torch.zeros(B * 3, H, N, 2 * D)), [group(block_size=12)]),
    "kernel blocks of [2, B, …]": (
        per_layer(lambda: torch.zeros(2, B * 3, N, H, D)),
        [group(block_size=12)],
    ),
    "more blocks than the manager": (per_layer(lambda: torch.zeros(B + 3, N, H, D)), [group()]),
    "padded pages": (per_layer(padded), [group()]),
    "block-strided views": (per_layer(page_views), [group()]),
    "ascend pair": (per_layer(ascend_pair), [group()]),
    "ascend pair, with nothing": (
        per_layer(lambda: (*ascend_pair(), None, torch.zeros(0))),
        [group()],
    ),
    "ascend, one tensor": (per_layer(lambda: (aligned((B, N, 1, 72)),)), [group()]),
    "ascend, dtypes differ": (
        per_layer(lambda: (aligned((B, N, H, D), torch.int8), aligned((B, N, H, D)))),
        [group()],
    ),
    "hybrid, shared storage": shared_raw(),
    "hybrid, overlaid": overlaid(),
}


def flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() else []
    return [] if value is None else [t for part in value for t in flatten(part)]


def block_view(tensor: torch.Tensor, block: int, tokens: int) -> torch.Tensor:
    """Block ``block`` of a tensor, found without the code under test."""
    axis = 1 if tensor.shape[0] == 2 else 0
    rows = 1 if tensor.shape[axis] < 2 * B else tensor.shape[axis] // B
    assert rows == 1 or tokens == rows * N
    return tensor.narrow(axis, block * rows, rows)


def own_bytes(view: torch.Tensor) -> torch.Tensor:
    """The bytes of a view in the order of their addresses."""
    order = sorted(range(view.dim()), key=lambda dim: -view.stride()[dim])
    return view.permute(order).contiguous().flatten().view(torch.uint8)


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def gather(plane: Plane, storages: list[torch.UntypedStorage], block: int) -> torch.Tensor:
    whole = storage_bytes(storages[plane.storage])
    base = plane.offset + block * plane.block_stride
    return torch.cat([whole[base + at : base + at + size] for at, size in plane.segments])


def fill(view: torch.Tensor, seed: int) -> None:
    """Write a pattern through the view; small integers are exact in every dtype."""
    values = torch.arange(view.numel()) * 7 + seed * 13
    view.copy_((values % 113 + 1).to(view.dtype).view(view.shape))


def ranges(layout: CacheLayout, number: int) -> list[tuple[int, int, int]]:
    """(storage, first byte, end) of every segment of every block of a group."""
    return sorted(
        (plane.storage, start, start + size)
        for layer in layout.groups[number].layers
        for plane in layer.planes
        for block in range(layout.groups[number].num_blocks)
        for at, size in plane.segments
        for start in [plane.offset + block * plane.block_stride + at]
    )


def assert_disjoint(found: list[tuple[int, int, int]]) -> None:
    for (storage, _, end), (next_storage, start, _) in itertools.pairwise(found):
        assert storage != next_storage or end <= start


@pytest.mark.parametrize("name", LAYOUTS)
def test_segments_hold_the_bytes_of_the_tensor(name: str) -> None:
    caches, specs = LAYOUTS[name]
    layout, storages = describe_cache(caches, specs)
    for described, spec in zip(layout.groups, specs, strict=True):
        assert [layer.name for layer in described.layers] == list(spec.layer_names)
        for layer in described.layers:
            tensors = flatten(caches[layer.name])
            assert len(layer.planes) == len(tensors)
            for plane, tensor in zip(layer.planes, tensors, strict=True):
                for block in range(spec.num_blocks):
                    for storage in storages:
                        storage_bytes(storage).zero_()
                    view = block_view(tensor, block, spec.block_size)
                    fill(view, block)
                    got = gather(plane, storages, block)
                    assert torch.equal(got, own_bytes(view))
                    assert got.numel() == plane.block_bytes


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_never_share_bytes(name: str) -> None:
    layout, _ = describe_cache(*LAYOUTS[name])
    for number in range(len(layout.groups)):
        assert_disjoint(ranges(layout, number))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_can_be_sent(name: str) -> None:
    layout, storages = describe_cache(*LAYOUTS[name])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=CacheLayout) == layout
    assert layout.storage_bytes == tuple(storage.nbytes() for storage in storages)


@pytest.mark.parametrize(
    ("name", "num_storages", "num_segments"),
    [
        ("cpu, one storage", 1, 1),
        ("cpu, one per layer", L, 1),
        ("[2, B, N, H, D]", L, 2),
        ("BLNHC", 1, 1),
        ("LHBNC", 1, H),
        ("BHLNC", 1, H),
        ("ascend pair", 2 * L, 1),
        ("hybrid, shared storage", 1, 1),
        ("hybrid, overlaid", 1, 1),
        ("padded pages", L, 1),
    ],
)
def test_storages_and_segments(name: str, num_storages: int, num_segments: int) -> None:
    layout, storages = describe_cache(*LAYOUTS[name])
    assert len(storages) == num_storages
    assert len(layout.groups[0].layers[0].planes[0].segments) == num_segments


def test_aligned_slices_have_an_offset() -> None:
    layout, _ = describe_cache(*LAYOUTS["ascend pair"])
    assert all(plane.offset > 0 for layer in layout.groups[0].layers for plane in layer.planes)


def test_order_of_layers_is_that_of_the_group() -> None:
    caches = one_buffer("LBHNC")
    names = tuple(reversed(NAMES))
    layout, _ = describe_cache(caches, [group(names)])
    assert tuple(layer.name for layer in layout.groups[0].layers) == names


def test_a_layer_that_shares_its_cache_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caches = one_buffer("LBHNC")
    caches["shared"] = caches[NAMES[1]].view(caches[NAMES[1]].shape)
    with caplog.at_level(logging.INFO, logger="vllm.kvferry.describe"):
        layout, _ = describe_cache(caches, [group([*NAMES, "shared"])])
    assert [layer.name for layer in layout.groups[0].layers] == list(NAMES)
    assert f"layer shared: 512 of 512 bytes of each block are those of layer {NAMES[1]}" in (
        caplog.text
    )


def test_bytes_that_an_earlier_view_covers_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages = torch.zeros(B, 512, dtype=torch.int8)
    value = [
        pages[:, :128].view(torch.float32).view(B, N, D),
        pages[:, 192:256].view(torch.bfloat16).view(B, N, 8),
        # Over both, and over the 64 bytes between them that are nobody's.
        pages[:, :256].view(B, N, 64),
        # Inside the first.
        pages[:, 32:64],
    ]
    with caplog.at_level(logging.INFO, logger="vllm.kvferry.describe"):
        layout, _ = describe_cache({"layer": value}, [group(["layer"])])
    (layer,) = layout.groups[0].layers
    assert [plane.segments for plane in layer.planes] == [((0, 128),), ((0, 64),), ((128, 64),)]
    assert layer.block_bytes == 256
    assert_disjoint(ranges(layout, 0))
    assert "32 of 32 bytes of each block are those of layer layer already" in caplog.text


def test_views_that_mix_blocks_are_refused() -> None:
    pages = torch.zeros(B + 1, 64, dtype=torch.int8)
    value = [pages[:B], pages[1:]]
    with pytest.raises(ConfigError, match=r"layer x lies over layer x so that different blocks"):
        describe_cache({"x": value}, [group(["x"])])


def test_overlapping_views_of_different_page_sizes_are_refused() -> None:
    raw = torch.zeros(B * 64, dtype=torch.int8)
    value = [raw.view(B, 64), raw[: B * 32].view(B, 32)]
    with pytest.raises(ConfigError, match="different blocks share bytes"):
        describe_cache({"x": value}, [group(["x"])])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(B - 1, H, N), "no dimension that counts 10 blocks of 4 tokens"),
        (torch.zeros(B + 3, 3, 7), "no dimension that counts 10 blocks of 4 tokens"),
        (torch.zeros(B, 1, N, D).expand(B, H, N, D), "addresses bytes twice"),
        (torch.zeros(B * 16).as_strided((B, 16), (8, 1)), "addresses bytes twice"),
        (torch.zeros(B, N, D, device="meta"), "no memory"),
        (torch.zeros(B, N).to_sparse(), "not a strided one"),
        ({"k": 1}, "type dict"),
        ([torch.zeros(B, N, D), "scale"], "type str"),
    ],
)
def test_what_cannot_be_described_names_the_layer(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"layer model.layers.9.*{text}"):
        describe_cache({"model.layers.9": value}, [group(["model.layers.9"])])


def test_a_missing_layer() -> None:
    with pytest.raises(ConfigError, match="layer gone of KV cache group 0 was not registered"):
        describe_cache(one_buffer("LBHNC"), [group([*NAMES, "gone"])])


def test_a_layer_of_no_group() -> None:
    caches = {**one_buffer("LBHNC"), "stray": torch.zeros(B, N, D)}
    with pytest.raises(ConfigError, match=r"layer stray .* in no KV cache group"):
        describe_cache(caches, [group()])


def test_two_devices_are_refused() -> None:
    caches = {"a": torch.zeros(B, N, D), "b": torch.zeros(B, N, D, device="meta")}
    with pytest.raises(ConfigError, match="layer b lies on meta, others on cpu"):
        describe_cache(caches, [group(["a", "b"])])


@pytest.mark.parametrize("value", [None, [], (torch.zeros(0),)])
def test_a_group_without_bytes(value: Any) -> None:
    with pytest.raises(ConfigError, match="group 0 has no layers"):
        describe_cache({"a": value}, [group(["a"])])


@pytest.mark.parametrize("spec", [group(num_blocks=0), group(block_size=0)])
def test_a_group_without_blocks(spec: GroupSpec) -> None:
    with pytest.raises(ConfigError, match="KV cache group 0 has"):
        describe_cache(one_buffer("LBHNC"), [spec])


def digest(caches: Caches, **changes: int) -> str:
    layout, _ = describe_cache(caches, [group(list(caches), **changes)])
    return layout_digest(layout.groups[0])


def test_digest_is_that_of_the_bytes_of_a_block() -> None:
    ours = digest(one_buffer("LBHNC"))
    assert len(ours) == 16
    assert digest(one_buffer("BLHNC")) == ours
    assert digest(per_layer(lambda: torch.zeros(B, H, N, 2 * D))) == ours
    assert digest(per_layer(padded)) == ours
    more = per_layer(lambda: torch.zeros(2 * B, H, N, 2 * D))
    assert digest(more, num_blocks=2 * B) == ours
    renamed = {f"other.{i}": value for i, value in enumerate(one_buffer("LBHNC").values())}
    assert digest(renamed) == ours


@pytest.mark.parametrize(
    "caches",
    [
        # The same number of bytes in one segment, but tokens outside heads.
        one_buffer("LBNHC"),
        per_layer(lambda: torch.zeros(B, 2, N, H, D)),
        per_layer(lambda: torch.zeros(B, H, N, 2 * D, dtype=torch.int32)),
        per_layer(lambda: torch.zeros(B, H, N, 2 * D, dtype=torch.float64)),
        per_layer(lambda: (torch.zeros(B, H, N, D), torch.zeros(B, H, N, D))),
        per_layer(lambda: torch.zeros(2, B, H, N, D)),
        dict(list(one_buffer("LBHNC").items())[:2]),
    ],
)
def test_digest_tells_other_bytes(caches: Caches) -> None:
    assert digest(caches) != digest(one_buffer("LBHNC"))


def test_digest_tells_plane_order_and_split_blocks() -> None:
    pairs = per_layer(ascend_pair)
    assert digest(pairs) != digest({name: (v, k) for name, (k, v) in pairs.items()})
    whole = per_layer(lambda: torch.zeros(B, H, 8, D))
    split = per_layer(lambda: torch.zeros(B * 2, H, 4, D))
    assert digest(whole, block_size=8) != digest(split, block_size=8)
