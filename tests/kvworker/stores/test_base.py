import pytest

from kvworker.stores.base import RangeIO, covers, fits


@pytest.mark.parametrize(
    ("addresses", "sizes", "offsets", "is_good"),
    [
        ([1, 2], [10, 20], [80, 0], True),
        ([1], [100], [0], True),
        ([1], [101], [0], False),
        ([1], [10], [91], False),
        ([1], [10], [-1], False),
        ([1], [0], [0], False),
        ([1], [-5], [10], False),
        ([], [], [], False),
        ([1], [10, 10], [0, 10], False),
        ([1, 2], [10, 10], [0], False),
    ],
)
def test_a_piece_fits_its_object(
    addresses: list[int], sizes: list[int], offsets: list[int], *, is_good: bool
) -> None:
    assert fits(RangeIO("key", addresses, sizes, offsets), 100) is is_good


@pytest.mark.parametrize(
    ("sizes", "offsets", "is_whole"),
    [
        ([10, 20], [0, 10], True),
        ([10], [0], True),
        ([10, 20], [0, 11], False),
        ([10, 20], [0, 9], False),
        ([20, 10], [10, 0], False),
        ([10], [1], False),
        ([], [], False),
        ([10, 0], [0, 10], False),
        ([10, 10], [0], False),
    ],
)
def test_a_piece_covers_its_object(sizes: list[int], offsets: list[int], *, is_whole: bool) -> None:
    assert covers(RangeIO("key", [1] * len(sizes), sizes, offsets)) is is_whole
