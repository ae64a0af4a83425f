import threading
import time

import pytest

from kvworker.core.commands import (
    Cancel,
    ClosePuts,
    FindKeys,
    MapEngine,
    OpenGets,
    OpenPuts,
    PublishProgress,
    UnmapEngine,
)
from kvworker.core.events import (
    EngineMapped,
    EngineUnmapped,
    GetsOpened,
    KeysFound,
    LayersLoaded,
    LayersWritten,
    PutsClosed,
    PutsOpened,
    WorkerEvent,
)
from kvworker.devices.cpu import CpuDevice
from kvworker.outcome import Outcome
from kvworker.transfer import executor
from tests.kvworker.devices.layouts import NUM_LAYERS, one_storage
from tests.kvworker.transfer.rig import ENGINE, OK, Model, OddStore, Rig, rig_with

KEYS = ("a", "b")


def test_loads_do_not_wait_behind_saves() -> None:
    with rig_with(one_storage()) as (rig, store, _):
        rig.save(["a"], [1])
        rig.open_puts(["b"])
        store.waits.add("put_ranges")
        write = rig.write_command(["b"], [2])
        rig.submit(write)
        assert store.arrived.wait(20)
        rig.open_gets(["a"])
        assert rig.load(["a"], [3]).outcomes == (OK,)
        found = rig.ask(FindKeys(op=next(rig.ops), engine=ENGINE, keys=("a",)))
        assert isinstance(found, KeysFound)
        store.resume.set()
        written = rig.answer(write.op)
        assert isinstance(written, LayersWritten)
        assert written.outcomes == (OK,)
        rig.close_gets(["a"])
        rig.close_puts(revoke=["b"])


def test_every_command_is_answered_once_by_a_store_that_raises() -> None:
    with rig_with(one_storage()) as (rig, store, _):
        store.raises = {"find", "put_start", "put_ranges", "put_end", "put_revoke", "get_start"}
        store.raises |= {"get_ranges", "get_end"}
        store.hide_local = True
        assert rig.open_puts(KEYS).outcomes == (Outcome.FAILED,) * 2
        written = rig.write(KEYS, [1, 2])
        assert written.outcomes == (Outcome.FAILED,) * 2
        assert written.num_bytes == (0, 0)
        closed = rig.close_puts(end=["a"], revoke=["b"])
        assert (closed.ended, closed.revoked) == ((Outcome.FAILED,), (Outcome.FAILED,))
        opened = rig.open_gets(KEYS)
        assert isinstance(opened, GetsOpened)
        assert opened.outcomes == (Outcome.FAILED,) * 2
        assert rig.load(KEYS, [1, 2]).outcomes == (Outcome.FAILED,) * 2
        rig.close_gets(KEYS)
        store.raises.clear()
        assert rig.open_puts(KEYS).outcomes == (OK,) * 2
        rig.close_puts(revoke=KEYS)
    # Leaving the rig has checked that no operation was answered twice.


def test_progress_is_published_before_submit_returns() -> None:
    with rig_with(one_storage()) as (rig, _, model):
        rig.submit(PublishProgress(engine=ENGINE, step=3, num_layers=4, failed=True))
        assert model.page.read(3) == (4, True)
        rig.submit(PublishProgress(engine="nobody#0", step=4, num_layers=4, failed=True))
        rig.unmap()
        rig.submit(PublishProgress(engine=ENGINE, step=5, num_layers=4, failed=True))
        assert model.page.read(5) == (0, False)


def test_what_needs_an_engine_is_cancelled_without_one() -> None:
    rig = Rig(OddStore())
    assert rig.open_puts(KEYS).outcomes == (Outcome.CANCELLED,) * 2
    assert rig.write(KEYS, [1, 2]).outcomes == (Outcome.CANCELLED,) * 2
    opened = rig.open_gets(KEYS)
    assert isinstance(opened, GetsOpened)
    assert opened.outcomes == (Outcome.CANCELLED,) * 2
    assert rig.load(KEYS, [1, 2]).outcomes == (Outcome.CANCELLED,) * 2
    rig.close()


def test_sessions_of_an_engine_that_is_gone_are_still_closed() -> None:
    with rig_with(one_storage()) as (rig, store, _):
        rig.save(["a"], [1])
        rig.open_puts(["b"])
        rig.open_gets(["a"])
        rig.unmap()
        assert rig.close_puts(revoke=["b"]).revoked == (OK,)
        rig.close_gets(["a"])
        assert store.local("a") is None


def test_what_was_meant_for_the_old_attach_never_touches_the_new_one() -> None:
    with rig_with(one_storage()) as (rig, store, _):
        rig.save(KEYS, [1, 2])
        rig.open_gets(KEYS)
        # Keep the load thread busy with something that does not touch the engine's memory.
        store.waits.add("get_start")
        busy = OpenGets(op=next(rig.ops), engine=ENGINE, step=1, group=0, keys=("x",))
        waiting = rig.load_command(KEYS, [5, 6], step=2)
        rig.submit(busy)
        assert store.arrived.wait(20)
        rig.submit(waiting)
        unmap = UnmapEngine(op=next(rig.ops), engine=ENGINE)
        rig.submit(unmap)
        newcomer = Model(one_storage(), 9)
        attach = MapEngine(op=next(rig.ops), engine=ENGINE, attach=newcomer.attach())
        rig.submit(attach)
        before = newcomer.cache.everything()
        assert isinstance(rig.answer(attach.op), EngineMapped)
        store.resume.set()
        late = rig.answer(waiting.op)
        assert isinstance(late, LayersLoaded)
        assert late.outcomes == (Outcome.CANCELLED,) * 2
        assert newcomer.cache.everything() == before
        assert newcomer.page.read(2) == (0, False)
        rig.close_gets(KEYS)
        rig.unmap()
        newcomer.close()


def test_unmapping_waits_for_a_save_that_runs() -> None:
    with rig_with(one_storage()) as (rig, store, _):
        rig.open_puts(KEYS)
        store.waits.add("put_ranges")
        running, waiting = rig.write_command(KEYS, [1, 2]), rig.write_command(KEYS, [1, 2])
        rig.submit(running)
        rig.submit(waiting)
        assert store.arrived.wait(20)
        unmap = UnmapEngine(op=next(rig.ops), engine=ENGINE)
        rig.submit(unmap)
        assert len(store.registered) == 1
        store.resume.set()
        assert isinstance(rig.answer(unmap.op), EngineUnmapped)
        first, second = rig.answer(running.op), rig.answer(waiting.op)
        assert isinstance(first, LayersWritten)
        assert isinstance(second, LayersWritten)
        assert first.outcomes == (OK,) * 2
        assert second.outcomes == (Outcome.CANCELLED,) * 2
        assert rig.events.index(first) < rig.events.index(rig.answer(unmap.op))
        assert store.registered == {}
        rig.close_puts(revoke=KEYS)


def test_a_cancelled_save_that_waits_is_not_begun() -> None:
    with rig_with(one_storage()) as (rig, store, _):
        rig.open_puts(KEYS)
        store.waits.add("put_ranges")
        running, waiting = rig.write_command(KEYS, [1, 2]), rig.write_command(KEYS, [1, 2])
        rig.submit(running)
        rig.submit(waiting)
        assert store.arrived.wait(20)
        rig.submit(Cancel(op=waiting.op))
        rig.submit(Cancel(op=12345))
        store.resume.set()
        answer = rig.answer(waiting.op)
        assert isinstance(answer, LayersWritten)
        assert answer.outcomes == (Outcome.CANCELLED,) * 2
        assert store.calls.count("put_ranges") == 1
        rig.close_puts(revoke=KEYS)


def test_what_gives_back_cannot_be_cancelled() -> None:
    with rig_with(one_storage()) as (rig, store, _):
        rig.open_puts(KEYS)
        store.waits.add("put_ranges")
        running = rig.write_command(KEYS, [1, 2])
        rig.submit(running)
        assert store.arrived.wait(20)
        closing = ClosePuts(op=next(rig.ops), engine=ENGINE, step=1, revoke=KEYS)
        rig.submit(closing)
        rig.submit(Cancel(op=closing.op))
        store.resume.set()
        closed = rig.answer(closing.op)
        assert isinstance(closed, PutsClosed)
        assert closed.revoked == (OK,) * 2


def test_more_than_the_backlog_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "MAX_BACKLOG", 2)
    with rig_with(one_storage()) as (rig, store, _):
        store.waits.add("find")
        commands = [FindKeys(op=next(rig.ops), engine=ENGINE, keys=("a",)) for _ in range(4)]
        rig.submit(commands[0])
        assert store.arrived.wait(20)
        for command in commands[1:]:
            rig.submit(command)
        # While the first one still runs.
        refused = rig.answer(commands[3].op)
        assert isinstance(refused, KeysFound)
        assert refused.outcomes == (Outcome.DOWN,)
        store.resume.set()
        for command in commands[:3]:
            answer = rig.answer(command.op)
            assert isinstance(answer, KeysFound)
            assert answer.outcomes == (Outcome.MISS,)


def test_closing_answers_everything_and_unmaps() -> None:
    with rig_with(one_storage()) as (rig, store, model):
        rig.save(KEYS, [1, 2])
        rig.open_gets(KEYS)
        store.hide_local = True
        store.waits.add("get_ranges")
        running, waiting = rig.load_command(KEYS, [3, 4]), rig.load_command(KEYS, [3, 4], step=2)
        rig.submit(running)
        rig.submit(waiting)
        assert store.arrived.wait(20)
        opening = OpenGets(op=next(rig.ops), engine=ENGINE, step=1, group=0, keys=KEYS)
        rig.submit(opening)
        closer = threading.Thread(target=rig.executor.close, args=(20,))
        closer.start()
        store.resume.set()
        closer.join()
        for command in (running, waiting):
            loaded = rig.answer(command.op)
            assert isinstance(loaded, LayersLoaded)
            assert set(loaded.outcomes) <= {OK, Outcome.CANCELLED}
            assert model.page.read(command.step)[0] == NUM_LAYERS
        assert isinstance(rig.answer(opening.op), GetsOpened)
        assert store.registered == {}
        late = OpenPuts(op=next(rig.ops), engine=ENGINE, step=1, group=0, keys=KEYS)
        answer = rig.ask(late)
        assert isinstance(answer, PutsOpened)
        assert answer.outcomes == (Outcome.CANCELLED,) * 2
        assert isinstance(rig.close_puts(end=KEYS), PutsClosed)


def test_closing_does_not_wait_for_a_store_that_hangs() -> None:
    store, model = OddStore(), Model(one_storage(), 1)
    rig = Rig(store)
    rig.map(model)
    store.waits.add("get_start")
    hanging = OpenGets(op=next(rig.ops), engine=ENGINE, step=1, group=0, keys=KEYS)
    waiting = OpenGets(op=next(rig.ops), engine=ENGINE, step=1, group=0, keys=KEYS)
    rig.submit(hanging)
    rig.submit(waiting)
    assert store.arrived.wait(20)
    rig.executor.close(timeout_s=0)
    answer = rig.answer(waiting.op)
    assert isinstance(answer, GetsOpened)
    assert answer.outcomes == (Outcome.CANCELLED,) * 2
    # What the stuck thread might still touch is still there.
    assert len(store.registered) == 1
    store.resume.set()
    assert isinstance(rig.answer(hanging.op), GetsOpened)
    rig.close()
    model.close()


def test_an_answer_that_could_not_be_posted_is_not_followed_by_another() -> None:
    posted: list[WorkerEvent] = []

    def post(event: WorkerEvent) -> None:
        posted.append(event)
        raise RuntimeError("the inbox is closed")

    made = executor.Executor(CpuDevice("cpu:0"), OddStore(), post, time.monotonic_ns)
    made.submit(FindKeys(op=1, engine=ENGINE, keys=KEYS))
    made.close()
    assert [getattr(event, "op", 0) for event in posted] == [1]
