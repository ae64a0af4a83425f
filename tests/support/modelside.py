"""The model side with an attachment of the test's own, and a page that the test publishes to."""

from typing import Any, cast

from kvcommon.ids import EngineId, new_epoch
from kvcommon.memory.page import ProgressPage
from kvsched.core.commands import ModelLoad, TellModel
from kvsched.link import DaemonLink
from kvsched.metadata import StepMetadata, step_metadata
from kvsched.model_side import ModelSide
from kvsched.pending import DataLink

NAMES = tuple(f"layer{index}" for index in range(4))


class StillAttachment:
    """An ``Attachment`` without a thread: what it says is what the test last set."""

    def __init__(self, serving: int = 1) -> None:
        self.generation = serving
        self.attached = serving > 0
        self.capabilities = ()

    @property
    def serving(self) -> int:
        return self.generation if self.attached else 0

    def close(self) -> None:
        self.attached = False


def model_side(
    attachment: StillAttachment,
    page: ProgressPage,
    link: DaemonLink,
    load_timeout_ms: float = 60_000,
) -> ModelSide:
    data = DataLink(link, EngineId("e"), new_epoch())
    return ModelSide(cast("Any", attachment), page, data, NAMES, load_timeout_ms)


def layerwise(job_id: int, *block_ids: int) -> ModelLoad:
    return ModelLoad(job_id=job_id, request_id=f"r{job_id}", layerwise=True, block_ids=block_ids)


def later(job_id: int, *block_ids: int) -> ModelLoad:
    return ModelLoad(job_id=job_id, request_id=f"r{job_id}", layerwise=False, block_ids=block_ids)


def loading(step: int, *loads: ModelLoad, saves: bool = False) -> StepMetadata:
    return step_metadata(TellModel(step=step, loads=loads, saves=saves))


def saving(step: int) -> StepMetadata:
    return step_metadata(TellModel(step=step, saves=True))


def run_step(
    model: ModelSide, metadata: StepMetadata, names: tuple[str, ...] = NAMES
) -> tuple[set[str], set[int], bool]:
    """All hooks in vLLM's order; returns (finished, failed blocks, reported)."""
    model.bind(metadata)
    model.start_load()
    for name in names:
        model.wait_for_layer(name)
        model.layer_computed(name)
    model.step_computed()
    finished, failed = model.finished_loads(), model.failed_blocks()
    report = model.report(metadata.step)
    model.clear()
    assert report is None or report.step == metadata.step
    return finished, failed, report is not None
