import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from kvcommon.errors import HandleError, LocalProtocolError
from kvcommon.memory.handles import FileHandle, LocalHandle, PageHandle
from kvcommon.memory.page import NUM_SLOTS, PAGE_BYTES, ProgressPage, expected_answer


@pytest.fixture
def sides() -> Iterator[tuple[ProgressPage, ProgressPage]]:
    """The model side's page and the daemon's."""
    ours = ProgressPage.create()
    theirs = ProgressPage.open(ours.handle)
    yield ours, theirs
    theirs.close()
    ours.close()


def test_what_one_side_publishes_the_other_reads(sides: tuple[ProgressPage, ProgressPage]) -> None:
    ours, theirs = sides
    assert ours.read(7) == (0, False)
    theirs.publish(7, 3, failed=False)
    assert ours.read(7) == (3, False)
    theirs.publish(7, 8, failed=True)
    assert ours.read(7) == (8, True)


def test_a_slot_belongs_to_the_newest_step(sides: tuple[ProgressPage, ProgressPage]) -> None:
    ours, theirs = sides
    for step in range(1, NUM_SLOTS + 1):
        theirs.publish(step, step, failed=step % 2 == 0)
    for step in range(1, NUM_SLOTS + 1):
        assert ours.read(step) == (step, step % 2 == 0)
    theirs.publish(NUM_SLOTS + 1, 5, failed=False)
    assert ours.read(1) == (0, False)
    assert ours.read(NUM_SLOTS + 1) == (5, False)
    assert ours.read(2 * NUM_SLOTS + 1) == (0, False)


@pytest.mark.parametrize(("step", "layers"), [((1 << 40) - 1, (1 << 23) - 1), (1, 0)])
def test_the_largest_and_smallest_numbers_fit(
    sides: tuple[ProgressPage, ProgressPage], step: int, layers: int
) -> None:
    ours, theirs = sides
    for failed in (True, False):
        theirs.publish(step, layers, failed=failed)
        assert ours.read(step) == (layers, failed)


@pytest.mark.parametrize(("step", "layers"), [(0, 1), (1 << 40, 1), (1, 1 << 23), (1, -1), (-1, 1)])
def test_numbers_that_do_not_fit_change_nothing(
    sides: tuple[ProgressPage, ProgressPage], step: int, layers: int
) -> None:
    ours, theirs = sides
    theirs.publish(1, 4, failed=False)
    with pytest.raises(LocalProtocolError, match="do not fit"):
        theirs.publish(step, layers, failed=False)
    assert ours.read(1) == (4, False)


def test_the_answer_shows_that_both_sides_map_the_same_page(
    sides: tuple[ProgressPage, ProgressPage],
) -> None:
    ours, theirs = sides
    assert ours.nonce != 0
    assert ours.answered() == 0
    theirs.answer(expected_answer(theirs.nonce))
    assert ours.answered() == expected_answer(ours.nonce)
    other = ProgressPage.create()
    assert ours.answered() != expected_answer(other.nonce)
    other.close()


def test_a_renewed_page_waits_for_a_new_answer(sides: tuple[ProgressPage, ProgressPage]) -> None:
    ours, theirs = sides
    old = ours.nonce
    theirs.answer(expected_answer(theirs.nonce))
    ours.renew()
    assert theirs.nonce == ours.nonce != old
    assert ours.answered() == 0


def test_a_reader_never_sees_half_a_word(sides: tuple[ProgressPage, ProgressPage]) -> None:
    ours, theirs = sides
    # Two steps of one slot whose words differ in every byte that may differ.
    words = [(1, 0x2AAAAA, False), (1 + 0x5555555500, 0x555555, True)]
    done = threading.Event()

    def write() -> None:
        for _ in range(20_000):
            for step, layers, failed in words:
                theirs.publish(step, layers, failed)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        for step, layers, failed in words:
            seen.add(ours.read(step))
            assert ours.read(step) in {(layers, failed), (0, False)}
    writer.join()
    assert seen <= {(0x2AAAAA, False), (0x555555, True), (0, False)}


def test_another_process_publishes() -> None:
    page = ProgressPage.create()
    code = (
        "import sys, msgspec\n"
        "from kvcommon.memory.handles import PageHandle\n"
        "from kvcommon.memory.page import ProgressPage, expected_answer\n"
        "page = ProgressPage.open(msgspec.json.decode(sys.argv[1], type=PageHandle))\n"
        "page.answer(expected_answer(page.nonce))\n"
        "page.publish(12, 34, True)\n"
        "page.close()\n"
    )
    text = msgspec.json.encode(page.handle).decode()
    path = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code, text], check=True, env=env, timeout=60)
    assert page.read(12) == (34, True)
    assert page.answered() == expected_answer(page.nonce)
    page.close()


def test_a_page_in_the_same_process_can_be_opened_by_address() -> None:
    page = ProgressPage.create()
    address = page._mapped.address
    local = LocalHandle(address=address, size=PAGE_BYTES, pid=os.getpid())
    other = ProgressPage.open(PageHandle(storage=local))
    other.publish(3, 2, failed=False)
    assert page.read(3) == (2, False)
    other.close()
    page.publish(3, 4, failed=False)
    page.close()


def test_what_is_no_page_is_refused() -> None:
    fd = os.memfd_create("not a page")
    os.ftruncate(fd, PAGE_BYTES)
    info = os.fstat(fd)
    handle = FileHandle(
        pid=os.getpid(), fd=fd, size=PAGE_BYTES, st_dev=info.st_dev, st_ino=info.st_ino
    )
    with pytest.raises(HandleError, match="same version"):
        ProgressPage.open(PageHandle(storage=handle))
    small = msgspec.structs.replace(handle, size=64)
    with pytest.raises(HandleError, match="64 bytes"):
        ProgressPage.open(PageHandle(storage=small))
    os.close(fd)


def test_the_page_cannot_shrink_under_its_readers() -> None:
    page = ProgressPage.create()
    storage = page.handle.storage
    assert isinstance(storage, FileHandle)
    with pytest.raises(PermissionError):
        os.ftruncate(storage.fd, 0)
    page.close()


def test_a_closed_page_raises_instead_of_crashing() -> None:
    page = ProgressPage.create()
    page.close()
    page.close()
    with pytest.raises(ValueError, match="released"):
        page.read(1)
    with pytest.raises(ValueError, match="released"):
        page.publish(1, 1, failed=False)
