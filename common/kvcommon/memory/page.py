"""The progress page: how far the loads of a step are, readable without a system call.

One page of memory, created and owned by the model side, mapped by the daemon too. The daemon
writes, the model side reads. Header words: magic, version, nonce (by the model side), answer (by
the daemon). Then a ring of slots, one 64-bit word each; step ``s`` uses slot ``s`` modulo their
number::

    step << 24 | failed << 23 | number of complete layers

A word is written by one aligned 8-byte store, so that a reader sees all of it or none.

Memory order. What a word promises is that the bytes of those layers lie in the KV cache. x86 keeps
stores and loads in order; ARM does not. Python has no fences, but it has locks: a store-release
(unlocking) followed by a load-acquire (locking) cannot be passed in either direction on AArch64.
So the writer locks and unlocks a private lock twice between the copies and its store, and the
reader does so between its load and whatever it does with the blocks. Nobody else ever takes that
lock, so that costs about 0.15 µs and no system call.

Lifecycle: ``create`` (model side) or ``open`` (daemon), use, ``close``. Threading: ``read`` and
``publish`` may be called by any thread until ``close``; one thread publishes for one step.
"""

import ctypes
import fcntl
import os
import threading

from kvcommon.errors import HandleError, LocalProtocolError
from kvcommon.memory.cpu import Mapped, map_handle
from kvcommon.memory.handles import FileHandle, PageHandle

#: Bytes of the page.
PAGE_BYTES = 4096
#: Steps that are remembered; one before that reads as "not begun".
NUM_SLOTS = 64
#: Version of the layout of the page. History: 1 first version.
PAGE_VERSION = 1

_MAGIC = int.from_bytes(b"kvfpage\0", "little")
_NONCE_WORD, _ANSWER_WORD = 2, 3
#: The slots begin on cache lines of their own.
_FIRST_SLOT = 64
_SLOT_MASK = NUM_SLOTS - 1
_STEP_SHIFT = 24
_FAILED_BIT = 1 << 23
_LAYERS_MASK = _FAILED_BIT - 1
_MAX_STEP = 1 << (64 - _STEP_SHIFT)


def expected_answer(nonce: int) -> int:
    """What a daemon that sees ``nonce`` in the page answers. Never 0."""
    return (nonce ^ 0xA5A5_5A5A_A5A5_5A5A) or 1


class ProgressPage:
    """One side's view of the page. Use ``create`` or ``open``."""

    def __init__(self, handle: PageHandle, mapped: Mapped, owned_fd: int | None = None) -> None:
        """Take over a mapping of ``PAGE_BYTES`` and, on the owner's side, the file behind it."""
        #: With which the other side opens the page.
        self.handle = handle
        self._mapped = mapped
        self._owned_fd = owned_fd
        self._fence_lock = threading.Lock()
        array = (ctypes.c_uint64 * (PAGE_BYTES // 8)).from_address(mapped.address)
        # A memoryview, because it refuses to be used after ``close`` where ctypes would crash.
        self._words = memoryview(array).cast("B").cast("Q")

    @classmethod
    def create(cls) -> "ProgressPage":
        """Make a new page with a fresh nonce. The caller owns it and closes it."""
        fd = os.memfd_create("kvferry-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE_BYTES)
        # A page that shrank would kill its readers with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        info = os.fstat(fd)
        storage = FileHandle(
            pid=os.getpid(), fd=fd, size=PAGE_BYTES, st_dev=info.st_dev, st_ino=info.st_ino
        )
        page = cls(PageHandle(storage=storage), map_handle(storage), fd)
        page.renew()
        page._words[1] = PAGE_VERSION
        page._words[0] = _MAGIC
        return page

    @classmethod
    def open(cls, handle: PageHandle) -> "ProgressPage":
        """Map a page of another side.

        Raises:
            HandleError: it cannot be mapped, or is no page of a version that we speak.
        """
        mapped = map_handle(handle.storage)
        if mapped.size < PAGE_BYTES:
            mapped.close()
            raise HandleError(f"the progress page has {mapped.size} bytes, not {PAGE_BYTES}")
        page = cls(handle, mapped)
        magic, version = page._words[0], page._words[1]
        if (magic, version) != (_MAGIC, PAGE_VERSION):
            page.close()
            cause = f"no progress page of version {PAGE_VERSION} (it says {magic:#x}, {version})"
            raise HandleError(cause, "run the same version of kvferry on both sides")
        return page

    @property
    def nonce(self) -> int:
        """The owner's random word, never 0: both sides see it only if they map the same memory."""
        return self._words[_NONCE_WORD]

    def renew(self) -> None:
        """Draw a new nonce and forget the answer: the owner's part, before each attach."""
        self._words[_ANSWER_WORD] = 0
        self._words[_NONCE_WORD] = int.from_bytes(os.urandom(8), "little") or 1

    def answer(self, value: int) -> None:
        """Write the daemon's answer (``expected_answer(nonce)``)."""
        self._words[_ANSWER_WORD] = value

    def answered(self) -> int:
        """Return the daemon's answer, 0 if there is none yet."""
        return self._words[_ANSWER_WORD]

    def publish(self, step: int, num_layers: int, failed: bool) -> None:
        """Say that the first ``num_layers`` layers of ``step`` are in their blocks.

        Args:
            step: From 1. Takes the slot from the step that was ``NUM_SLOTS`` before.
            num_layers: Complete layers, in layer-table order. All of them: the load has ended.
            failed: Some block holds other bytes than were asked for.

        Raises:
            LocalProtocolError: a number does not fit the word.
        """
        if not (0 < step < _MAX_STEP and 0 <= num_layers <= _LAYERS_MASK):
            raise LocalProtocolError(f"step {step} or {num_layers} layers do not fit the page")
        word = step << _STEP_SHIFT | (_FAILED_BIT if failed else 0) | num_layers
        self._fence()
        self._words[_FIRST_SLOT + (step & _SLOT_MASK)] = word

    def read(self, step: int) -> tuple[int, bool]:
        """Return (complete layers, failed) of ``step``; (0, False) if nothing was published."""
        word = self._words[_FIRST_SLOT + (step & _SLOT_MASK)]
        if word >> _STEP_SHIFT != step:
            return 0, False
        self._fence()
        return word & _LAYERS_MASK, word & _FAILED_BIT != 0

    def close(self) -> None:
        """Unmap, and on the owner's side close the file. Later use raises. Idempotent."""
        self._words.release()
        self._mapped.close()
        fd, self._owned_fd = self._owned_fd, None
        if fd is not None:
            os.close(fd)

    def _fence(self) -> None:
        # Unlock, then lock: see the module docstring. Twice in full, so that threads may share it.
        with self._fence_lock:
            pass
        with self._fence_lock:
            pass
