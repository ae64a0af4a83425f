"""A Mooncake library that answers what it is told to: for what a healthy one never says."""

import collections
from typing import Any

from kvcommon.config import MooncakeConfig
from kvworker.stores.base import RangeIO
from kvworker.stores.mooncake import MooncakeStore
from kvworker.stores.mooncake_client import MooncakeClient


class Scripted:
    """Gives the scripted answers of a method in turn; 0 for every key after that."""

    def __init__(self) -> None:
        self.script: dict[str, list[Any]] = collections.defaultdict(list)
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, method: str) -> Any:
        def answer(*args: Any) -> Any:
            self.calls.append((method, args[0] if args else None))
            return self.script[method].pop(0) if self.script[method] else [0] * len(args[0])

        return answer


def scripted_store() -> tuple[MooncakeStore, Scripted]:
    store = MooncakeStore(MooncakeConfig(master_server_address="127.0.0.1:1"))
    library = Scripted()
    store._client = MooncakeClient(library)
    return store, library


def byte_pieces(key: str, count: int = 1) -> RangeIO:
    return RangeIO(key, [64] * count, [1] * count, list(range(count)))
