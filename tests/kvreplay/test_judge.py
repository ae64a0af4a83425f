"""All rules together, over the logs of right and wrong cores."""

from pathlib import Path

from kvreplay.judge import ALL_RULES, check_rules
from kvworker.core import events as work
from tests.kvreplay import scenes
from tests.kvreplay.pair import Pair


def test_every_rule_has_a_name_of_its_own() -> None:
    names = [rule.name for rule in ALL_RULES]
    assert len(set(names)) == len(names) == 11


def test_right_cores_break_no_rule_and_leave_nothing_open(tmp_path: Path) -> None:
    pair = Pair(tmp_path, ranks=2)
    for number, text in enumerate("abcab"):
        pair.serve(f"req-{number}", 100 + number, text, step=3 * number + 1, first_block=10)
    logs = pair.close().logs
    judgement = check_rules(logs, frozenset(log.label for log in logs))
    assert (judgement.violations, judgement.open) == ([], [])


def test_violations_are_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    scene = scenes.Scene(tmp_path)
    for op in range(7):
        scene.worker(work.GetsClosed(now_ns=scene.tick(), op=op))
    logs = scene.close().logs
    judgement = check_rules(logs, frozenset({scenes.WORKER}), max_violations=3)
    assert (len(judgement.violations), judgement.num_more) == (3, 4)
    assert check_rules(logs, frozenset()).violations == []
