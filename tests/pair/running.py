"""How the simple vLLM runs a step: layer by layer, right only if all before it is right."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.pair.model import NUM_LAYERS, Model
from tests.pair.records import SIZE, Part, Pool, Request, Step
from tests.pair.store import HASHES, LENGTH, RIGHT

if TYPE_CHECKING:
    from tests.pair.world import World


class Running:
    """The half of the engine that runs steps and takes their tokens."""

    world: "World"
    models: list[Model]
    steps: list[Step]
    requests: dict[str, Request]
    pool: Pool

    def ready_to_run(self) -> Step | None:
        return next((step for step in self.steps if not step.is_over), None)

    def run(self, *, wait: bool) -> bool:
        """Go on with the oldest step by one layer; without ``wait`` loads that lag are given up.

        False: it waits for a load.
        """
        step = self.ready_to_run()
        assert step is not None
        if step.layer < 0:
            step.layer = 0
            for model in self.models:
                model.begin(step.number, step.tell)
        for model in self.models:
            if not model.is_loaded(step.layer):
                if wait and model.may_wait:
                    return False
                model.give_up()
        self._compute(step)
        for model in self.models:
            model.layer_computed(step.layer)
        step.layer += 1
        if step.layer == NUM_LAYERS:
            step.is_over = True
            for rank, model in enumerate(self.models):
                recved, failed = model.collect()
                step.recved += [(rank, name) for name in sorted(recved)]
                step.invalid |= failed
        return True

    def _compute(self, step: Step) -> None:
        """Write one layer of a step's blocks: right only if all before them is right."""
        layer = step.layer
        parts = list(step.parts)
        for part in parts:
            # A block that was computed in part before, or loaded, may stay right.
            self._write(part, layer, None, [i for i in part.targets if i * SIZE >= part.start])
        changed = True
        while changed:
            changed = False
            for part in list(parts):
                if self._is_right(part, part.start, layer):
                    self._write(part, layer, part.request.text, part.targets)
                    parts.remove(part)
                    changed = True
        for part in parts:
            self._write(part, layer, None, part.targets)

    def _write(self, part: Part, layer: int, text: str | None, indices: Iterable[int]) -> None:
        for index in indices:
            word = RIGHT[HASHES[text][index]] if text is not None else None
            for model in self.models:
                model.memory.blocks[part.blocks[index]][layer] = word

    def _is_right(self, part: Part, num_tokens: int, end_layer: int) -> bool:
        return all(
            model.memory.is_right(
                part.blocks[index], RIGHT[HASHES[part.request.text][index]], end_layer
            )
            for index in range(math.ceil(num_tokens / SIZE))
            for model in self.models
        )

    def _sample(self, part: Part) -> Request | None:
        """Take a token; the request if that was its last."""
        request = part.request
        if not part.samples or part.generation != request.generation:
            return None
        assert self._is_right(part, part.end, NUM_LAYERS), f"a wrong token of {request.name}"
        request.placeholders -= 1
        request.num_tokens += 1
        request.num_new -= 1
        is_last = request.num_new <= 0 or request.num_tokens >= LENGTH * SIZE
        return request if is_last else None

    def _roll_back(self, invalid: set[int]) -> None:
        """Policy ``recompute``: from the first bad block on, whoever has it."""
        tables = [part.blocks for step in self.steps for part in step.parts]
        for table in [*tables, *(request.blocks for request in self.requests.values())]:
            first = next((i for i, block in enumerate(table) if block in invalid), len(table))
            doubted = {*invalid, *table[first:]}
            self.pool.cached = {h: b for h, b in self.pool.cached.items() if b not in doubted}
        for request in self.requests.values():
            bad = [index for index, block in enumerate(request.blocks) if block in invalid]
            if bad:
                request.computed = min(request.computed, bad[0] * SIZE)
                request.generation += 1
                request.placeholders = 0
