import ctypes

from kvcommon.messages import StoreState
from kvworker.faults import Plan, Rule
from kvworker.outcome import Outcome
from kvworker.stores.base import RangeIO, Store
from kvworker.stores.faults import faulty_store
from kvworker.stores.memory import MemoryStore


def store(*rules: Rule) -> Store:
    made = faulty_store(MemoryStore(1 << 20), Plan(store=rules))
    made.open()
    return made


def test_calls_that_no_rule_names_work() -> None:
    faulty = store(Rule(call="get_start", what="fail"))
    assert faulty.put_start(["a"], [4]) == [Outcome.OK]
    assert faulty.probe() is StoreState.UP
    faulty.close()


def test_each_key_gets_the_outcome_of_the_rule() -> None:
    faulty = store(
        Rule(call="put_start", what="fail", outcome=Outcome.FULL),
        Rule(call="find", what="hang", seconds=0.01),
        Rule(call="probe", what="fail"),
    )
    assert faulty.put_start(["a", "b"], [4, 4]) == [Outcome.FULL, Outcome.FULL]
    assert faulty.find(["a"]) == [Outcome.DOWN]
    assert faulty.probe() is StoreState.DOWN
    faulty.close()


def test_a_dropped_answer_of_work_that_was_done() -> None:
    faulty = store(Rule(call="put_start", what="drop"))
    assert faulty.put_start(["a"], [4]) == [Outcome.DOWN]
    # It is open all the same.
    assert faulty.put_revoke(["a"]) == [Outcome.OK]
    faulty.close()


def test_half_of_the_keys_and_half_of_the_bytes() -> None:
    source = ctypes.create_string_buffer(b"abcd", 4)
    faulty = store(
        Rule(call="put_start", what="truncate", outcome=Outcome.FAILED),
        Rule(call="put_ranges", what="truncate", outcome=Outcome.FAILED),
    )
    assert faulty.put_start(["a", "b"], [4, 4]) == [Outcome.OK, Outcome.FAILED]
    piece = RangeIO("a", [ctypes.addressof(source)], [4], [0])
    assert faulty.put_ranges([piece]) == [Outcome.FAILED]
    faulty.close()
