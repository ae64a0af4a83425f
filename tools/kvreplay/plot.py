"""``plot``: transfers against layers, as a picture.

The model side keeps no log, so its layers are seen through what it tells the daemon: when a step
began, when layers were computed; and when the scheduler side saw the step's output.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcommon import messages as msg
from kvreplay.loading import Entry, LogSet
from kvreplay.merge import merge
from kvreplay.ops import ended_op, engine_id, started_op
from kvreplay.words import engine_name
from kvsched.core import events as sched
from kvworker.core import commands as work_do
from kvworker.core import events as work

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Steps that are kept while reading; the newest win.
_MAX_STEPS: Final = 512
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


class PlotError(Exception):
    """There is nothing to draw, or nothing to draw with; the message says what to do."""


@dataclass
class StepTimes:
    """One step of one rank; times in nanoseconds since the step began."""

    engine: str
    step: int
    begun_ns: int
    finished_ns: int | None = None
    #: (time, layers that are complete in the blocks).
    loaded: list[tuple[int, int]] = field(default_factory=list)
    #: (time, layers that the model has computed).
    computed: list[tuple[int, int]] = field(default_factory=list)
    #: (time, layers that are written to the store).
    written: list[tuple[int, int]] = field(default_factory=list)


def collect(logs: LogSet) -> list[StepTimes]:
    """Gather the steps that loaded or saved something, in order."""
    reader = _Reader(logs)
    for entry in merge(logs.logs):
        reader.add(entry)
    return [one for one in reader.steps.values() if one.loaded or one.written]


class _Reader:
    def __init__(self, logs: LogSet) -> None:
        self._shifts = {log.label: log.shift_ns for log in logs.logs}
        self.steps: dict[tuple[str, int], StepTimes] = {}
        self._ops: dict[tuple[str, int], work_do.LoadLayers | work_do.WriteLayers] = {}

    def add(self, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, work.ModelSaid):
            self._model(entry, event)
        elif isinstance(event, sched.StepFinished):
            for step in self.steps.values():
                ours = engine_id(step.engine) == entry.engine and step.step == event.step
                if ours and step.finished_ns is None:
                    step.finished_ns = entry.at_ns - step.begun_ns
        op = ended_op(event)
        if op is not None:
            command = self._ops.pop((entry.log, op), None)
            if command is not None:
                self._transfer(entry, command)
        for started in entry.commands:
            if isinstance(started, (work_do.LoadLayers, work_do.WriteLayers)):
                self._ops[entry.log, started_op(started) or 0] = started

    def _model(self, entry: Entry, event: work.ModelSaid) -> None:
        body = event.body
        if isinstance(body, msg.StepBegun):
            step = StepTimes(event.engine, body.step, entry.at_ns)
            self.steps.setdefault((event.engine, body.step), step)
            if len(self.steps) > _MAX_STEPS:
                del self.steps[next(iter(self.steps))]
        elif isinstance(body, msg.LayersComputed):
            found = self.steps.get((event.engine, body.step))
            if found is not None:
                found.computed.append((entry.at_ns - found.begun_ns, body.num_layers))

    def _transfer(self, entry: Entry, command: work_do.LoadLayers | work_do.WriteLayers) -> None:
        step = self.steps.get((command.engine, command.step))
        if step is None:
            return
        if isinstance(entry.event, work.LayersLoaded):
            shift = self._shifts[entry.log] - step.begun_ns
            for number, at_ns in enumerate(entry.event.layer_ns):
                step.loaded.append((at_ns + shift, command.first_layer + number + 1))
        else:
            step.written.append((entry.at_ns - step.begun_ns, command.end_layer))


def draw(steps: list[StepTimes], path: Path, *, max_steps: int = 6) -> None:
    """Draw loads and saves of the newest steps into a PNG.

    Raises:
        PlotError: nothing to draw, or matplotlib is not installed.
    """
    if not steps:
        raise PlotError("no step in these logs has loaded or saved anything")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise PlotError("plot needs matplotlib: pip install 'kvferry[plot]'") from None
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    loads, saves = figure.subplots(2, 1)
    loading = [step for step in steps if step.loaded][-max_steps:]
    saving = [step for step in steps if step.written][-max_steps:]
    loads.set_title("Loads: layers complete in the blocks; dotted: the step's output was seen")
    saves.set_title("Saves: layers computed by the model (dashed) and written to the store")
    for axes, chosen in ((loads, loading), (saves, saving)):
        for colour, step in zip(_COLOURS, chosen, strict=False):
            _draw_step(axes, step, colour, save=axes is saves)
        axes.set_xlabel("ms since the step began")
        axes.set_ylabel("layers")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=True, alpha=0.3)
        if chosen:
            # The lines matter; a first step that was compiled may have finished far to the right.
            lines = (step.written if axes is saves else step.loaded for step in chosen)
            longest = max(at_ns for line in lines for at_ns, _ in line)
            axes.set_xlim(left=0, right=max(1.5 * longest, 1) / 1e6)
            axes.legend(fontsize="small", loc="lower right")
        else:
            axes.text(0.5, 0.5, "none in these logs", ha="center", transform=axes.transAxes)
    figure.savefig(path, dpi=110)


def _draw_step(axes: "Axes", step: StepTimes, colour: str, *, save: bool) -> None:
    # A dollar sign would begin a formula.
    engine = engine_name(step.engine).replace("$", r"\$")
    name = f"step {step.step} of {engine}"
    line = step.written if save else step.loaded
    style: dict[str, Any] = {"where": "post", "color": colour}
    axes.step(*_points(line), label=name, marker="o", markersize=3, **style)
    if step.computed:
        axes.step(*_points(step.computed), linestyle="--", alpha=0.6, **style)
    if step.finished_ns is not None:
        axes.axvline(step.finished_ns / 1e6, color=colour, linestyle=":", alpha=0.8)


def _points(line: list[tuple[int, int]]) -> tuple[list[float], list[int]]:
    ordered = sorted([(0, 0), *line])
    return [at_ns / 1e6 for at_ns, _ in ordered], [layers for _, layers in ordered]
