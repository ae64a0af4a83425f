"""Scenes in which nothing fails."""

from tests.e2e.stack import prompt
from tests.histories.scenes_processes import BOTH, TWO_RANKS, Scene
from tests.histories.stage import Setting, Stage


def layerwise(stage: Stage) -> None:
    """A prompt is saved in chunks, forgotten, loaded; then one that shares its beginning."""
    with stage.engine(max_num_batched_tokens=128) as engine:
        engine.call("wait_attached")
        engine.generate([prompt(1, 300)])
        engine.forget()
        engine.generate([prompt(1, 300)])
        engine.generate([[*prompt(1, 160), *prompt(2, 100)], prompt(3, 40)])
        engine.settle()


def asynchronous(stage: Stage) -> None:
    """Loads between steps."""
    with stage.engine(stage.connector(load="async")) as engine:
        engine.call("wait_attached")
        engine.generate([prompt(1, 200), prompt(2, 200)])
        engine.forget()
        engine.generate([prompt(1, 200), prompt(2, 200), prompt(3, 100)])
        engine.settle()


def two_ranks(stage: Stage) -> None:
    """A model on two ranks, each with its daemon; saved, forgotten, loaded."""
    with stage.engine(**TWO_RANKS) as engine:
        engine.call("wait_attached")
        engine.generate([prompt(1, 200)])
        engine.forget()
        engine.generate([prompt(1, 200), prompt(2, 70)])
        engine.settle()


SCENES: dict[str, Scene] = {
    "layerwise": (layerwise, Setting()),
    "mooncake": (layerwise, Setting(with_mooncake=True)),
    "asynchronous": (asynchronous, Setting()),
    "two-ranks": (two_ranks, Setting(with_mooncake=True, devices=BOTH)),
}
