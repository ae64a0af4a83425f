"""Scenes in which processes die, freeze and come back."""

import os
import signal
from collections.abc import Callable
from typing import Any

from tests.e2e.engines import EngineProcess
from tests.e2e.stack import prompt
from tests.histories.relay import Relay
from tests.histories.stage import (
    REMOTE,
    Setting,
    Stage,
    doomed,
    freeze,
    meanwhile,
    slow,
    wait_for,
    workers,
)

TEXT = prompt(1, 140)
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
Scene = tuple[Callable[[Stage], None], Setting]


def recovers(engine: EngineProcess) -> None:
    """All is well again: what is saved now is a hit.

    A store that comes back takes its time: it is tried until it is so.
    """

    def is_hit() -> bool:
        (answer,) = engine.generate([prompt(9, 70)])
        engine.forget()
        return bool(answer["cached"])

    wait_for(is_hit, "a hit", every_s=0.5)


def attached_again(stage: Stage, engine: EngineProcess, device: str = "cpu:0") -> None:
    """Wait until a daemon serves the engine."""
    stage.until("engines_attached", device=device)
    engine.call("wait_attached")


def saved(engine: EngineProcess) -> None:
    """A prompt is in the store, and nowhere else."""
    engine.call("wait_attached")
    engine.generate([TEXT])
    engine.forget()


def daemon_killed(stage: Stage) -> None:
    """The daemon dies between two prompts; the engine serves on, and attaches to the next one."""
    with stage.engine() as engine:
        saved(engine)
        stage.daemons["cpu:0"].kill()
        engine.generate([TEXT])
        stage.another_daemon()
        attached_again(stage, engine)
        recovers(engine)


def daemon_killed_in_load(stage: Stage) -> None:
    """It dies while a layer is on its way."""
    with stage.engine() as engine:
        saved(engine)
        with meanwhile(engine, [TEXT]):
            stage.until("gets_open")
            stage.until_logged("LoadLayers")
            stage.daemons["cpu:0"].kill()
        stage.another_daemon()
        attached_again(stage, engine)
        recovers(engine)


def daemon_killed_in_save(stage: Stage) -> None:
    """It dies while it writes; Mooncake keeps the key blocked for a while."""
    with stage.engine() as engine:
        engine.call("wait_attached")
        engine.generate([TEXT])
        stage.until("puts_open")
        stage.until_logged("WriteLayers")
        stage.another_daemon()
        attached_again(stage, engine)
        engine.forget()
        engine.generate([TEXT])
        engine.settle()
        recovers(engine)


def daemon_restarted(stage: Stage) -> None:
    """It is stopped in an orderly way, and started again."""
    with stage.engine() as engine:
        saved(engine)
        stage.daemons["cpu:0"].stop()
        stage.another_daemon()
        attached_again(stage, engine)
        recovers(engine)


def daemon_frozen(stage: Stage) -> None:
    """It stands for the time of one request."""
    with stage.engine(stage.connector(lookup_timeout_ms=200)) as engine:
        saved(engine)
        stage.freeze()
        engine.generate([TEXT])
        stage.thaw()
        engine.forget()
        engine.generate([TEXT])
        engine.settle()


def daemon_fenced(stage: Stage) -> None:
    """It stands in the middle of a load, and does not go on."""
    connector = stage.connector(load_timeout_ms=800, fence_timeout_ms=2000)
    with stage.engine(connector) as engine:
        saved(engine)
        with meanwhile(engine, [TEXT]):
            stage.until("gets_open")
            stage.until_logged("LoadLayers")
            stage.freeze()
        engine.settle()
        stage.another_daemon()
        attached_again(stage, engine)
        recovers(engine)


def daemon_may_not_be_killed(stage: Stage) -> None:
    """The same, but the kernel names another process as the one behind the socket."""
    path = stage.run_dir / "relay.sock"
    with Relay(path, stage.daemons["cpu:0"].socket_path) as relay:
        connector = stage.connector(
            load_timeout_ms=800, fence_timeout_ms=2000, daemons=relay.endpoint
        )
        with stage.engine(connector) as engine:
            saved(engine)
            with meanwhile(engine, [TEXT]):
                stage.until("gets_open")
                stage.until_logged("LoadLayers")
                stage.freeze()
            engine.settle()
            stage.thaw()
            stage.until_none("jobs_open")
            recovers(engine)


def daemon_comes_later(stage: Stage) -> None:
    """The engine serves before there is any daemon."""
    with stage.engine() as engine:
        engine.generate([TEXT])
        stage.another_daemon()
        attached_again(stage, engine)
        recovers(engine)


def one_of_two_daemons_killed(stage: Stage) -> None:
    """The daemon of rank 1 dies; nothing can be loaded without its part."""
    with stage.engine(**TWO_RANKS) as engine:
        saved(engine)
        stage.daemons["cpu:1"].kill()
        engine.generate([TEXT])
        stage.another_daemon("cpu:1")
        attached_again(stage, engine, "cpu:1")
        recovers(engine)


def engine_killed(stage: Stage) -> None:
    """The engine dies; another one takes what it had saved."""
    with doomed(stage.engine()) as engine:
        saved(engine)
    stage.until_none("engines_attached")
    with stage.engine() as engine:
        engine.call("wait_attached")
        engine.generate([TEXT])
        engine.settle()


def engine_killed_in_save(stage: Stage) -> None:
    """The engine dies while its blocks are read."""
    with doomed(stage.engine()) as engine:
        engine.call("wait_attached")
        with meanwhile(engine, [TEXT]):
            stage.until("puts_open")
            stage.until_logged("WriteLayers")
            engine.kill()
    stage.until_none("engines_attached")
    stage.until_none("operations_open")
    with stage.engine() as engine:
        saved(engine)
        engine.generate([TEXT])
        engine.settle()


def engine_restarted(stage: Stage) -> None:
    """The engine ends in an orderly way; the next one starts warm."""
    for _ in range(2):
        with stage.engine() as engine:
            engine.call("wait_attached")
            engine.generate([TEXT])
            engine.settle()


def engine_frozen(stage: Stage) -> None:
    """The engine stands for longer than its lease, and goes on."""
    with stage.engine(stage.connector(lease_ms=1500, heartbeat_ms=300)) as engine:
        saved(engine)
        freeze(engine.pid)
        stage.until_none("engines_attached")
        os.kill(engine.pid, signal.SIGCONT)
        attached_again(stage, engine)
        engine.generate([TEXT])
        engine.settle()


def worker_killed(stage: Stage) -> None:
    """One of two model workers dies in the middle of a load; the next engine starts warm."""
    with doomed(stage.engine(**TWO_RANKS)) as engine:
        saved(engine)
        with meanwhile(engine, [TEXT]):
            stage.until("gets_open", device="cpu:1")
            stage.until_logged("LoadLayers", num_logs=2)
            workers(engine)[1].kill()
            stage.until_none("engines_attached", "cpu:1")
            engine.kill()
    stage.until_none("engines_attached")
    stage.until_none("operations_open", "cpu:1")
    with stage.engine(**TWO_RANKS) as engine:
        engine.call("wait_attached")
        engine.generate([TEXT])
        engine.settle()


IN_LOAD = (REMOTE, slow("get_ranges"))
BOTH = ("cpu:0", "cpu:1")
SCENES: dict[str, Scene] = {
    "daemon-killed": (daemon_killed, Setting()),
    "daemon-killed-in-load": (daemon_killed_in_load, Setting(store=IN_LOAD)),
    "daemon-killed-in-save": (
        daemon_killed_in_save,
        Setting(with_mooncake=True, store=(slow("put_ranges"),)),
    ),
    "daemon-restarted": (daemon_restarted, Setting()),
    "daemon-frozen": (daemon_frozen, Setting()),
    "daemon-fenced": (daemon_fenced, Setting(store=IN_LOAD)),
    "daemon-may-not-be-killed": (
        daemon_may_not_be_killed,
        Setting(store=(REMOTE, slow("get_ranges", 5.0, times=1))),
    ),
    "daemon-comes-later": (daemon_comes_later, Setting(no_daemons=True)),
    "one-of-two-daemons-killed": (
        one_of_two_daemons_killed,
        Setting(with_mooncake=True, devices=BOTH),
    ),
    "engine-killed": (engine_killed, Setting()),
    "engine-killed-in-save": (
        engine_killed_in_save,
        Setting(store=(slow("put_ranges", 5.0, times=1),)),
    ),
    "engine-restarted": (engine_restarted, Setting()),
    "engine-frozen": (engine_frozen, Setting()),
    "worker-killed": (
        worker_killed,
        Setting(
            with_mooncake=True,
            devices=BOTH,
            store=(REMOTE, slow("get_ranges", 5.0, times=1)),
            only_on="cpu:1",
        ),
    ),
}
