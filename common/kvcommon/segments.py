"""Where the bytes of one block are in a strided tensor: arithmetic on shapes, no torch.

A plane is a strided view of a storage. Its blocks lie one ``block_stride`` apart, and one block is
a set of byte runs, the *segments*. Sizes and offsets are bytes, shapes and strides are elements.
"""

from collections.abc import Sequence

#: (offset within the block, length), bytes.
Segment = tuple[int, int]


def block_axis(shape: Sequence[int], num_blocks: int, block_size: int) -> tuple[int, int] | None:
    """Find the dimension that counts blocks, and how many of its rows make one block.

    The dimension is the first with at least ``num_blocks`` rows. So dimension 0 wins wherever
    several would do, which is right for every layout but ``[2, B, …]`` with only two blocks.

    Kernels may use finer blocks than the manager: block ``b`` is then the rows
    ``[b * rows, (b + 1) * rows)``, and another dimension has the ``block_size / rows`` tokens of
    such a row. A tensor may also have more blocks than the manager uses (ranks of Ascend). Hence:

    1. exactly ``num_blocks`` rows: one row a block;
    2. a multiple of it: so many rows a block if another dimension bears that out;
    3. else what the other dimensions say, if only one answer leaves enough rows for all blocks.

    Returns:
        (axis, rows), or None where none of these holds: guessing would store wrong bytes.
    """
    axis = next((dim for dim, size in enumerate(shape) if size >= num_blocks), None)
    if axis is None:
        return None
    exact, rest = divmod(shape[axis], num_blocks)
    if rest == 0 and exact == 1:
        return axis, 1
    others = [*shape[:axis], *shape[axis + 1 :]]
    possible = {block_size // tokens for tokens in others if tokens and block_size % tokens == 0}
    if rest == 0 and exact in possible:
        return axis, exact
    enough = [rows for rows in possible if rows * num_blocks <= shape[axis]]
    return (axis, enough[0]) if len(enough) == 1 else None


def block_segments(
    shape: Sequence[int], stride: Sequence[int], item_bytes: int, axis: int, rows: int
) -> tuple[Segment, ...]:
    """Give the segments of one block, ascending, merged where contiguous."""
    dims = [
        (step * item_bytes, size)
        for dim, (step, size) in enumerate(zip(stride, shape, strict=True))
        if dim != axis and size > 1
    ]
    if rows > 1:
        dims.append((stride[axis] * item_bytes, rows))
    dims.sort()
    run = item_bytes
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    offsets = [0]
    for step, size in dims:
        offsets = [offset + i * step for i in range(size) for offset in offsets]
    return tuple((offset, run) for offset in sorted(offsets))


def physical_order(
    shape: Sequence[int], stride: Sequence[int], axis: int, rows: int
) -> tuple[tuple[int, int], ...]:
    """Give the dimensions of one block from outermost to innermost: (dimension, size).

    Dimensions are numbered without the block axis; the rows of a split block are dimension -1. Two
    planes hold the elements of a block in the same order exactly if this is equal.
    """
    dims = [
        (step, dim - (dim > axis), size)
        for dim, (step, size) in enumerate(zip(stride, shape, strict=True))
        if dim != axis and size > 1
    ]
    if rows > 1:
        dims.append((stride[axis], -1, rows))
    dims.sort(reverse=True)
    return tuple((dim, size) for _, dim, size in dims)


def addresses_once(shape: Sequence[int], stride: Sequence[int], axis: int, num_rows: int) -> bool:
    """Say whether no byte of the first ``num_rows`` rows is addressed twice.

    Sufficient, not necessary: every dimension steps over all that lies below it.
    """
    sizes = [*shape]
    sizes[axis] = num_rows
    extent = 1
    for step, size in sorted(zip(stride, sizes, strict=True)):
        if size == 1:
            continue
        if step < extent:
            return False
        extent += step * (size - 1)
    return True


def span(segments: Sequence[Segment], offset: int, block_stride: int, num_blocks: int) -> Segment:
    """Give the first byte that any block uses, and the one after the last."""
    first = min(start for start, _ in segments)
    end = max(start + length for start, length in segments)
    return offset + first, offset + (num_blocks - 1) * block_stride + end


def other_block_clash(
    ours: Sequence[Segment], theirs: Sequence[Segment], block_stride: int, num_blocks: int
) -> bool:
    """Say whether a block of ours shares bytes with a block of theirs that has another id.

    Both lists are absolute (offsets of block 0), both planes have the same block stride.
    """
    for start, length in ours:
        for other, other_length in theirs:
            # Blocks k apart share bytes if other - end < k * stride < other_end - start.
            low = (other - start - length) // block_stride + 1
            high = -((start - other - other_length) // block_stride) - 1
            low, high = max(low, 1 - num_blocks), min(high, num_blocks - 1)
            if low <= high and not low == high == 0:
                return True
    return False


def subtract(segments: Sequence[Segment], taken: Sequence[Segment]) -> tuple[Segment, ...]:
    """Give what of ``segments`` lies in none of ``taken``. Both absolute, both ascending."""
    left = []
    for segment_start, length in segments:
        start, end = segment_start, segment_start + length
        for other, other_length in taken:
            if other + other_length <= start or other >= end:
                continue
            if other > start:
                left.append((start, other - start))
            start = min(end, other + other_length)
        if start < end:
            left.append((start, end - start))
    return tuple(left)
