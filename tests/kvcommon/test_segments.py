import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcommon.segments import (
    addresses_once,
    block_axis,
    block_segments,
    other_block_clash,
    physical_order,
    span,
    subtract,
)

Segments = tuple[tuple[int, int], ...]


@pytest.mark.parametrize(
    ("shape", "num_blocks", "block_size", "found"),
    [
        ((10, 4, 16, 64), 10, 16, (0, 1)),
        ((10, 2, 16, 4, 64), 10, 16, (0, 1)),
        ((2, 10, 16, 4, 64), 10, 16, (1, 1)),
        # Several dimensions would do: dimension 0.
        ((16, 4, 16, 16), 16, 16, (0, 1)),
        ((2, 16, 16, 4, 16), 16, 16, (1, 1)),
        ((32, 4, 8, 16), 16, 16, (0, 2)),
        # Finer kernel blocks, in both positions.
        ((30, 4, 16, 64), 10, 48, (0, 3)),
        ((2, 30, 16, 4, 64), 10, 48, (1, 3)),
        ((330, 16, 576), 10, 528, (0, 33)),
        # More blocks than the manager uses: not a multiple, twice as many, finer and more.
        ((13, 16, 4, 64), 10, 16, (0, 1)),
        ((20, 16, 4, 64), 10, 16, (0, 1)),
        ((23, 8, 3, 64), 10, 16, (0, 2)),
        # Token dimensions must not be taken for blocks.
        ((200, 128, 8, 128), 128, 128, (0, 1)),
        # A state without tokens.
        ((10, 3, 96), 10, 16, (0, 1)),
        # One row or two a block? Neither is sure.
        ((23, 8, 1, 16), 10, 16, None),
        ((13, 3, 7), 10, 16, None),
        ((9, 4, 4), 10, 16, None),
        ((), 10, 16, None),
    ],
)
def test_block_axis(
    shape: tuple[int, ...], num_blocks: int, block_size: int, found: tuple[int, int] | None
) -> None:
    assert block_axis(shape, num_blocks, block_size) == found


def brute_force(
    shape: tuple[int, ...], stride: tuple[int, ...], item: int, axis: int, rows: int
) -> set[int]:
    """Every byte of block 0, one by one."""
    sizes = [*shape]
    sizes[axis] = rows
    return {
        sum(i * s for i, s in zip(index, stride, strict=True)) * item + byte
        for index in itertools.product(*map(range, sizes))
        for byte in range(item)
    }


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int, int]:
    """A dense or padded tensor of any dimension order: shape, stride, item bytes, axis, rows."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(sizes) - 1))
    rows = draw(st.integers(1, 2))
    sizes[axis] *= rows
    stride = [0] * len(sizes)
    step = 1
    for dim in draw(st.permutations(range(len(sizes)))):
        step += draw(st.sampled_from((0, 0, 3)))
        stride[dim] = step
        step *= sizes[dim]
    return tuple(sizes), tuple(stride), draw(st.sampled_from((1, 2, 4))), axis, rows


@given(strided())
def test_segments_are_the_bytes_of_the_block(
    case: tuple[tuple[int, ...], tuple[int, ...], int, int, int],
) -> None:
    shape, stride, item, axis, rows = case
    segments = block_segments(shape, stride, item, axis, rows)
    covered = [byte for start, length in segments for byte in range(start, start + length)]
    assert covered == sorted(brute_force(shape, stride, item, axis, rows))


@given(strided())
def test_no_address_twice(case: tuple[tuple[int, ...], tuple[int, ...], int, int, int]) -> None:
    shape, stride, _, axis, _ = case
    assert addresses_once(shape, stride, axis, shape[axis])


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 2), (1, 1)), ((4, 3), (2, 1)), ((4, 2, 2), (4, 0, 1)), ((4, 4), (3, 1))],
)
def test_an_address_twice(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert not addresses_once(shape, stride, 0, shape[0])


def test_rows_beyond_the_last_block_may_overlap() -> None:
    assert addresses_once((4, 4), (3, 1), 0, 1)


def test_contiguous_runs_are_merged() -> None:
    assert block_segments((10, 4, 16, 64), (4096, 1024, 64, 1), 2, 0, 1) == ((0, 8192),)
    assert block_segments((10, 4, 16, 64), (1024, 10240, 64, 1), 2, 0, 1) == tuple(
        (head * 20480, 2048) for head in range(4)
    )


def test_physical_order_tells_head_major_from_token_major() -> None:
    shape = (10, 4, 16, 64)
    heads_first = physical_order(shape, (4096, 1024, 64, 1), 0, 1)
    tokens_first = physical_order(shape, (4096, 64, 256, 1), 0, 1)
    assert heads_first == ((0, 4), (1, 16), (2, 64))
    assert tokens_first == ((1, 16), (0, 4), (2, 64))
    assert physical_order((20, 4, 8, 64), (2048, 512, 64, 1), 0, 2)[0] == (-1, 2)


def test_span() -> None:
    assert span(((8, 4), (20, 4)), 100, 64, 3) == (108, 100 + 128 + 24)


segment_lists = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 8)), min_size=1, max_size=4
).map(lambda pairs: tuple(sorted(pairs)))


@given(segment_lists, segment_lists, st.integers(1, 30), st.integers(1, 5))
def test_clash_with_another_block(
    ours: Segments, theirs: Segments, stride: int, blocks: int
) -> None:
    def block_bytes(segments: Segments, block: int) -> set[int]:
        return {block * stride + s + i for s, length in segments for i in range(length)}

    expected = any(
        block_bytes(ours, a) & block_bytes(theirs, b)
        for a in range(blocks)
        for b in range(blocks)
        if a != b
    )
    assert other_block_clash(ours, theirs, stride, blocks) == expected


@given(segment_lists, segment_lists)
def test_subtract(ours: Segments, theirs: Segments) -> None:
    def members(segments: Segments) -> set[int]:
        return {s + i for s, length in segments for i in range(length)}

    left = subtract(ours, theirs)
    assert members(left) == members(ours) - members(theirs)
    assert all(length > 0 for _, length in left)
