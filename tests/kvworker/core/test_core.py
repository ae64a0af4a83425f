"""The core as a whole: who is heard, and that it is deterministic."""

import msgspec

from kvcommon.messages import Heartbeat, LayersComputed
from kvworker.core.commands import ClosePuts, LoadLayers, OpenGets, OpenPuts, WriteLayers
from kvworker.core.core import CoreConfig, WorkerCore
from tests.support.playbook import (
    ENGINE,
    MODEL,
    Playbook,
    load,
    only,
    save,
    started,
)


def busy() -> Playbook:
    play = started()
    play.answer(only(play.plan(1, load(1, {4: 40, 5: 50}), save(2, {6: 60})), OpenGets))
    commands = play.begin(1)
    play.answer(only(commands, OpenPuts))
    play.answer(only(commands, LoadLayers))
    play.answer(only(play.computed(1), WriteLayers))
    play.answer(only(play.verdict(1), ClosePuts))
    return play


def test_a_fresh_core_answers_a_log_with_the_same_bytes() -> None:
    play = busy()
    config = msgspec.msgpack.decode(msgspec.msgpack.encode(play.config), type=CoreConfig)
    core = WorkerCore(config)
    for event, commands in play.log:
        assert msgspec.msgpack.encode(core.handle(event)) == msgspec.msgpack.encode(commands)


def test_heartbeats_change_nothing() -> None:
    play = started()
    assert play.model(Heartbeat()) == []
    assert play.scheduler(Heartbeat()) == []


def test_an_older_incarnation_of_the_model_side_is_not_heard() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}))
    assert play.begin(1, epoch=MODEL - 1) == []
    assert play.core.status().metrics['kvferry_stale_messages_total{role="model"}'] == 1


def test_layers_may_be_reported_again_and_out_of_order() -> None:
    play = started()
    play.plan(1, save(1, {4: 40}))
    play.answer(only(play.begin(1), OpenPuts))
    play.answer(only(play.computed(1, 2), WriteLayers))
    assert play.model(LayersComputed(step=1, num_layers=1)) == []
    assert play.model(LayersComputed(step=1, num_layers=2)) == []


def test_engines_do_not_disturb_each_other() -> None:
    play = started()
    other = "other#0"
    play.attach(engine=other)
    play.hello(engine=other)
    play.plan(1, save(1, {4: 40}))
    play.plan(1, save(1, {4: 41}), engine=other)
    assert only(play.begin(1), OpenPuts).engine == ENGINE
    play.lose("model")
    assert only(play.begin(1, engine=other), OpenPuts).engine == other


def test_a_quiet_tick_does_nothing() -> None:
    assert started().tick(10_000) == []
