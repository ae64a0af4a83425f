import json
from pathlib import Path
from typing import Any

import pytest

from kvcommon.errors import ConfigError
from kvworker.faults import Injector, Plan, Rule, inject, read_plan


class Target:
    def __init__(self) -> None:
        self.calls = 0

    def work(self, amount: int) -> int:
        self.calls += amount
        return amount


def fault(rule: Rule, method: Any, args: tuple[Any, ...]) -> str:
    if rule.what == "drop":
        method(*args)
    return rule.what


def test_a_rule_hits_after_some_calls_and_so_many_times() -> None:
    rule = Rule(call="work", what="fail", after=2, times=2)
    target = inject(Target(), (rule,), 0, fault)
    assert [target.work(1) for _ in range(6)] == [1, 1, "fail", "fail", 1, 1]
    assert target.calls == 4


def test_a_dropped_call_was_done() -> None:
    target = inject(Target(), (Rule(call="work", what="drop"),), 0, fault)
    assert target.work(3) == "drop"  # type: ignore[comparison-overlap]
    assert target.calls == 3


def test_the_same_seed_hits_the_same_calls() -> None:
    rule = Rule(call="work", what="fail", chance=0.5)
    one, two, other = Injector(rule, 1), Injector(rule, 1), Injector(rule, 2)
    hits = [one.hit() for _ in range(64)]
    assert hits == [two.hit() for _ in range(64)]
    assert hits != [other.hit() for _ in range(64)]
    assert 0 < sum(hits) < 64


def test_an_unknown_call_is_refused() -> None:
    with pytest.raises(ConfigError, match="no call 'wrok' of Target"):
        inject(Target(), (Rule(call="wrok", what="fail"),), 0, fault)


def test_plans_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"seed": 3, "store": [{"call": "find", "what": "hang"}]}))
    assert read_plan(str(path)) == Plan(seed=3, store=(Rule(call="find", what="hang"),))
    path.write_text(json.dumps({"stroe": []}))
    with pytest.raises(ConfigError, match="no plan of faults"):
        read_plan(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_plan(str(tmp_path / "none.json"))
