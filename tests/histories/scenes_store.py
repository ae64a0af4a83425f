"""Scenes in which the store fails, or an answer is too late; and what requests themselves do."""

from tests.e2e.engines import EngineProcess
from tests.e2e.stack import prompt
from tests.histories.scenes_processes import TEXT, Scene, recovers, saved
from tests.histories.stage import REMOTE, Setting, Stage, failing, slow, wait_for


def load_fails(stage: Stage) -> None:
    """The first load goes wrong, the next one does not."""
    with stage.engine() as engine:
        saved(engine)
        engine.generate([TEXT])
        engine.forget()
        engine.generate([TEXT])
        engine.settle()


def save_fails(stage: Stage) -> None:
    """The first save goes wrong, the next one does not."""
    with stage.engine() as engine:
        saved(engine)
        engine.generate([TEXT])
        engine.forget()
        engine.generate([TEXT])
        engine.settle()


def store_full(stage: Stage) -> None:
    """A prompt is larger than the store; its beginning is a hit all the same."""
    with stage.engine() as engine:
        saved(engine)
        engine.generate([TEXT])
        engine.settle()


def lookup_hangs(stage: Stage) -> None:
    """The store answers a lookup when nobody waits for it any more."""
    with stage.engine(stage.connector(lookup_timeout_ms=200)) as engine:
        saved(engine)
        stage.until_none("lookups_open")
        engine.generate([TEXT])
        engine.settle()


def load_is_late(stage: Stage) -> None:
    """A layer comes when nobody waits for it any more."""
    with stage.engine(stage.connector(load_timeout_ms=800)) as engine:
        saved(engine)
        engine.generate([TEXT])
        engine.forget()
        engine.generate([TEXT])
        engine.settle()


def until_breaker(stage: Stage, engine: EngineProcess) -> None:
    """Serve prompts until the daemon does not even ask the store any more, and one then."""
    for number in range(20):
        engine.generate([prompt(20 + number, 70)])
        engine.settle()
        if not stage.metric("store_up"):
            break
    wait_for(lambda: not stage.metric("store_up"), "the breaker opens")
    # What hangs was asked before.
    stage.until_none("lookups_open")
    engine.generate([prompt(50, 70)])


def until_store_is_up(stage: Stage, engine: EngineProcess) -> None:
    """Wait for the probe that closes the breaker."""
    wait_for(lambda: stage.metric("store_up") == 1, "the store is up")
    engine.settle()


def store_down(stage: Stage) -> None:
    """Three calls in a row fail: the breaker opens, and a probe closes it."""
    with stage.engine() as engine:
        engine.call("wait_attached")
        until_breaker(stage, engine)
        until_store_is_up(stage, engine)
        recovers(engine)


def master_killed(stage: Stage) -> None:
    """The master dies, and comes back without anything."""
    with stage.engine(stage.connector(lookup_timeout_ms=200)) as engine:
        saved(engine)
        stage.master.kill()
        until_breaker(stage, engine)
        stage.master.start()
        until_store_is_up(stage, engine)
        recovers(engine)
        engine.generate([TEXT])
        engine.settle()


def master_restarted(stage: Stage) -> None:
    """It is started anew between two requests: everything is forgotten."""
    with stage.engine() as engine:
        saved(engine)
        stage.master.stop()
        stage.master.start()
        recovers(engine)
        engine.generate([TEXT])
        engine.settle()


def master_frozen(stage: Stage) -> None:
    """It stands for the time of one request."""
    with stage.engine(stage.connector(lookup_timeout_ms=200)) as engine:
        saved(engine)
        stage.master.freeze()
        engine.generate([TEXT])
        stage.master.thaw()
        stage.until_none("lookups_open")
        until_store_is_up(stage, engine)
        engine.forget()
        engine.generate([TEXT])
        engine.settle()


def aborted(stage: Stage) -> None:
    """A request is given up while its load is on its way."""
    with stage.stepped(stage.connector(load="async")) as engine:
        saved(engine)
        engine.call("add", request_id="given-up", prompt=TEXT)
        while not stage.metric("gets_open"):
            engine.call("step")
        engine.call("abort", request_id="given-up")
        engine.forget()
        engine.generate([TEXT])
        engine.settle()


def preempted(stage: Stage) -> None:
    """Three requests want more blocks than there are."""
    with stage.engine(num_gpu_blocks_override=16, max_model_len=256) as engine:
        engine.call("wait_attached")
        engine.generate([prompt(30 + number, 130) for number in range(3)], max_tokens=36)
        engine.settle()


SCENES: dict[str, Scene] = {
    "evicted": (load_fails, Setting(store=(failing("get_start", "miss"),))),
    "lease-expired": (
        load_fails,
        Setting(store=(REMOTE, failing("get_ranges", "expired", after=1))),
    ),
    "layer-fails": (load_fails, Setting(store=(REMOTE, failing("get_ranges", "failed", after=1)))),
    "save-fails": (save_fails, Setting(store=(failing("put_ranges", "failed"),))),
    "store-full": (store_full, Setting(arguments=("--memory-limit", "1MiB"))),
    "lookup-hangs": (
        lookup_hangs,
        Setting(store=({"call": "find", "what": "hang", "seconds": 2.0, "times": 1},)),
    ),
    "load-is-late": (load_is_late, Setting(store=(REMOTE, slow("get_ranges", 3.0, times=1)))),
    "store-down": (
        store_down,
        Setting(
            store=(
                failing("find", "down", 2),
                failing("put_start", "down", 1),
                # So often that the breaker is seen open.
                failing("probe", "down", 4),
            )
        ),
    ),
    "master-killed": (master_killed, Setting(with_mooncake=True)),
    "master-restarted": (master_restarted, Setting(with_mooncake=True)),
    "master-frozen": (master_frozen, Setting(with_mooncake=True)),
    "aborted": (aborted, Setting(store=(REMOTE, slow("get_ranges", 3.0, times=1)))),
    "preempted": (preempted, Setting()),
}
