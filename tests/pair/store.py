"""The store that all daemons of a world share, and the memory of model sides. Bytes are words.

The right word of block ``i`` of a text is ``(text, i)`` in every layer; ``None`` is a wrong one.
"""

from typing import TYPE_CHECKING

from kvcommon.ids import BlockHash
from kvcommon.keys import store_key
from tests.support.playbook import NUM_LAYERS
from tests.support.schedplay import hashes

if TYPE_CHECKING:
    from tests.pair.daemon import Daemon

Word = tuple[str, int] | None
TEXTS = "AB"
#: Blocks of a text.
LENGTH = 12

HASHES = {text: hashes(LENGTH, text) for text in TEXTS}
#: Block hash → the right word.
RIGHT: dict[bytes, Word] = {
    each: (text, index) for text, chain in HASHES.items() for index, each in enumerate(chain)
}


class Memory:
    """The KV cache and the progress page of one rank of one engine process."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[list[Word]] = [[None] * NUM_LAYERS for _ in range(num_blocks)]
        #: Step → (layers, failed).
        self.page: dict[int, tuple[int, bool]] = {}
        #: Newest step that this rank has begun.
        self.begun = 0
        #: Steps whose loads the model side does not wait for any more.
        self.given_up: set[int] = set()

    def is_right(self, block: int, word: Word, end_layer: int = NUM_LAYERS) -> bool:
        return all(each == word for each in self.blocks[block][:end_layer])


class Store:
    """Objects by key; those that are being written belong to a daemon."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.marks = marks
        self.objects: dict[str, list[Word]] = {}
        self.puts: dict[str, tuple[Daemon, list[Word]]] = {}
        #: Key → the right word, and → (rank, block hash).
        self.words: dict[str, Word] = {}
        self.names: dict[str, bytes] = {}
        for block_hash, word in RIGHT.items():
            for mark in marks:
                key = store_key(mark, 0, BlockHash(block_hash))  # type: ignore[arg-type]
                self.words[key] = word
                self.names[key] = block_hash

    def key(self, rank: int, block_hash: bytes) -> str:
        return store_key(self.marks[rank], 0, BlockHash(block_hash))  # type: ignore[arg-type]

    def is_whole(self, block_hash: bytes) -> bool:
        """Every rank's part of a block is stored."""
        return all(self.key(rank, block_hash) in self.objects for rank in range(len(self.marks)))

    def seed(self, text: str, count: int) -> None:
        """The beginning of a text is stored already."""
        for block_hash in HASHES[text][:count]:
            for rank in range(len(self.marks)):
                self.objects[self.key(rank, block_hash)] = [RIGHT[block_hash]] * NUM_LAYERS

    def publish(self, key: str) -> None:
        """Rule 3."""
        _, words = self.puts.pop(key)
        assert words == [self.words[key]] * NUM_LAYERS, f"rule 3: wrong bytes published: {words}"
        self.objects[key] = words

    def drop_puts(self, daemon: "Daemon") -> None:
        self.puts = {key: put for key, put in self.puts.items() if put[0] is not daemon}
