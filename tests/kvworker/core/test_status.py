"""What a person sees."""

from pathlib import Path

import msgspec

from kvcommon.messages import Status, StoreState
from kvworker.core.commands import ClosePuts, OpenGets, OpenPuts, WriteLayers
from kvworker.outcome import Outcome
from tests.support.playbook import ENGINE, MARK, OBJECT_BYTES, load, only, save, started

_PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_engines_recent_jobs_and_numbers() -> None:
    play = started()
    play.begin(1)
    play.computed(1)
    write = only(play.answer(only(play.plan(1, save(1, {4: 40})), OpenPuts)), WriteLayers)
    play.answer(write)
    play.answer(only(play.verdict(1), ClosePuts))
    play.answer(only(play.plan(2, load(2, {5: 50})), OpenGets), Outcome.MISS)
    play.plan(3, load(3, {6: 60}))
    play.tick(1000)
    status = play.core.status()
    assert status.store_state is StoreState.UP
    (engine,) = status.engines
    assert engine["engine"] == ENGINE
    assert engine["fingerprint"] == MARK
    assert (engine["state"], engine["scheduler"], engine["step"]) == ("mapped", True, 1)
    assert (engine["save_blocks"], engine["save_bytes"]) == (1, OBJECT_BYTES)
    assert (engine["load_jobs"], engine["load_blocks"], engine["open_loads"]) == (1, 0, 1)
    newest, oldest = status.recent
    assert (newest["job"], newest["outcome"], newest["reason"]) == (2, "failed", "evicted")
    assert (oldest["job"], oldest["kind"], oldest["bytes"]) == (1, "save", OBJECT_BYTES)
    assert isinstance(newest["age_s"], float)
    assert newest["age_s"] >= 1.0
    assert status.metrics["kvferry_jobs_open"] == 1
    assert status.metrics["kvferry_operations_open"] == 1
    name = 'kvferry_jobs_ended_total{kind="save",outcome="done",reason=""}'
    assert status.metrics[name] == 1


def test_it_fits_the_status_message() -> None:
    play = started()
    core = play.core.status()
    status = Status(
        pid=1,
        device="cpu:0",
        store="memory",
        store_state=core.store_state,
        engines=core.engines,
        recent=core.recent,
        metrics=core.metrics,
    )
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=Status)
    assert decoded.engines == core.engines


def test_no_more_than_32_recent_jobs() -> None:
    play = started()
    for number in range(40):
        play.answer(only(play.plan(1, load(number, {4: number})), OpenGets), Outcome.MISS)
    recent = play.core.status().recent
    assert [row["job"] for row in recent] == list(range(39, 7, -1))


def test_every_number_is_on_the_page() -> None:
    play = started()
    play.answer(only(play.plan(2, load(2, {5: 50})), OpenGets), Outcome.MISS)
    text = _PAGE.read_text()
    for name in play.core.status().metrics:
        assert f"`{name.partition('{')[0]}`" in text, name
