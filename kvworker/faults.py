"""Faults on purpose: a seeded plan of what goes wrong in calls of the store and of the device.

For tests and for rehearsals: ``kvworker serve --inject PLAN.json``. Never for production, and never
by accident: a daemon with a plan says so at start. See ``docs/failures.md``.
"""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvcommon.errors import ConfigError
from kvworker.outcome import Outcome

T = TypeVar("T")


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of fault in one kind of call."""

    #: Name of the method, for example ``get_ranges`` of the store or ``copy_in`` of the device.
    call: str
    #: ``delay``: late. ``hang``: late, and nothing was done. ``fail``: at once, nothing was done.
    #: ``drop``: done, and the answer is lost. ``truncate``: half of it is done.
    what: Literal["delay", "hang", "fail", "drop", "truncate"]
    #: Calls that go well before the first fault.
    after: int = 0
    #: Faults at most; 0: without end.
    times: int = 0
    #: Part of the calls that are hit, once it begins.
    chance: float = 1.0
    #: Of ``delay`` and ``hang``.
    seconds: float = 30.0
    #: What the keys of a failed store call get.
    outcome: Outcome = Outcome.DOWN


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All rules of a daemon."""

    seed: int = 0
    store: tuple[Rule, ...] = ()
    device: tuple[Rule, ...] = ()


def read_plan(path: str) -> Plan:
    """Read a plan.

    Raises:
        ConfigError: it cannot be read, or is no plan; says where.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Plan)
    except OSError as error:
        raise ConfigError(f"cannot read the faults to inject, {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no plan of faults: {error}") from None


class Injector:
    """Decides for each call whether a rule hits it. Any thread."""

    def __init__(self, rule: Rule, seed: int) -> None:
        self.rule = rule
        self._random = random.Random(f"{seed}/{rule.call}/{rule.what}")  # noqa: S311 (seeded on purpose)
        self._lock = threading.Lock()
        self._calls = 0
        self.hits = 0

    def hit(self) -> bool:
        """Count a call; say whether it goes wrong."""
        with self._lock:
            self._calls += 1
            spent = self.rule.times and self.hits >= self.rule.times
            if self._calls <= self.rule.after or spent:
                return False
            if self._random.random() >= self.rule.chance:
                return False
            self.hits += 1
            return True


def inject(
    target: T,
    rules: tuple[Rule, ...],
    seed: int,
    fault: Callable[[Rule, Callable[..., Any], tuple[Any, ...]], Any],
) -> T:
    """Put faults into methods of one object; ``fault`` does what a rule says to a call.

    Raises:
        ConfigError: a rule names a call that the object does not have.
    """
    for rule in rules:
        method = getattr(target, rule.call, None)
        if not callable(method):
            raise ConfigError(f"no call {rule.call!r} of {type(target).__name__} to inject into")
        setattr(target, rule.call, _wrapped(method, Injector(rule, seed), fault))
    return target


def _wrapped(
    method: Callable[..., Any],
    injector: Injector,
    fault: Callable[[Rule, Callable[..., Any], tuple[Any, ...]], Any],
) -> Callable[..., Any]:
    rule = injector.rule

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (stands in for any method)
        if not injector.hit():
            return method(*args, **kwargs)
        if rule.what in {"delay", "hang"}:
            time.sleep(rule.seconds)
        if rule.what == "delay":
            return method(*args, **kwargs)
        return fault(rule, method, args)

    return call
