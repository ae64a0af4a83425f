"""Faults in a store, as a plan says (``kvworker.faults``): every key gets an outcome, as always."""

from collections.abc import Callable, Sequence
from typing import Any

from kvcommon.messages import StoreState
from kvworker.faults import Plan, Rule, inject
from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO, Store

#: Calls that answer with one outcome per key.
_KEYED = frozenset(
    {
        "find",
        "put_start",
        "put_ranges",
        "put_end",
        "put_revoke",
        "put_objects",
        "get_start",
        "get_ranges",
    }
)


def faulty_store(store: Store, plan: Plan) -> Store:
    """Put the plan's faults into a store. Returns it.

    Raises:
        ConfigError: a rule names no call of a store.
    """
    return inject(store, plan.store, plan.seed, _fault)


def _fault(rule: Rule, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:  # noqa: ANN401
    if rule.call == "probe":
        return StoreState.DOWN
    if rule.call not in _KEYED:
        return {"remove_prefix": 0, "is_local": False}.get(rule.call)
    items: Sequence[Any] = args[0]
    if rule.what == "drop":
        method(*args)
    if rule.what != "truncate":
        return [rule.outcome] * len(items)
    if items and isinstance(items[0], RangeIO):
        # The pieces of each key arrive in part.
        method([_half(piece) for piece in items], *args[1:])
        return [rule.outcome] * len(items)
    count = len(items) // 2
    done: list[Outcome] = method(*(part[:count] for part in args))
    return [*done, *[rule.outcome] * (len(items) - count)]


def _half(piece: RangeIO) -> RangeIO:
    """The first half of the bytes."""
    size = max(1, piece.sizes[0] // 2)
    return RangeIO(piece.key, piece.addresses[:1], [size], piece.offsets[:1])
