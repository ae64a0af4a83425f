"""Moments that the engine survives: daemons and masters end or freeze, or the engine freezes."""

import time

from tests.chaos.faults import KINDS
from tests.chaos.leftovers import Survivor
from tests.chaos.round import MAX_TOKENS, PROMPTS, Round, say
from tests.chaos.table import Row
from tests.chaos.victim import Load, Victim
from tests.e2e.engines import EngineError

NUM_REQUESTS = 16


class Moments:
    """One engine, and what befalls it."""

    def __init__(self, this: Round) -> None:
        self._round = this
        self._survivor = Survivor(f"engine of {this.ranks}, under dying daemons")

    def run(self, kinds: list[str]) -> None:
        """Live through all of them, in this order."""
        this = self._round
        this.table.watched = True
        with this.engine(in_process=True) as engine:
            engine.call("measure")
            engine.call("wait_attached")
            engine.call("mixed", prompts=PROMPTS, max_tokens=2, aborted=[], prefix="warm")
            engine.call("quiet")
            for number, kind in enumerate(kinds):
                self._moment(engine, kind, number)
            this.bury(engine, "the end of an engine that lived")
        if self._survivor.samples:
            this.table.survivors.append(self._survivor)

    def _moment(self, engine: Victim, kind: str, number: int) -> None:
        this, around, fault = self._round, self._round.around, KINDS[kind]
        where = f"{kind}, moment {number}"
        if number % 2 == 0:
            # With an empty local cache everything is loaded, not only what was evicted.
            engine.call("reset")
        hits, deaths = engine.call("hits"), around.deaths
        chosen = this.chosen(NUM_REQUESTS)
        aborted = this.chosen(1)
        load = Load(
            engine,
            "mixed",
            prompts=[PROMPTS[index] for index in chosen],
            max_tokens=MAX_TOKENS,
            aborted=aborted,
            prefix=f"m{number}",
        )
        load.start()
        time.sleep(this.rng.uniform(0.0, 0.8))
        row = this.table.row(kind)
        row.moments += 1
        row.idle += not load.is_alive()
        frozen = fault.strike(around, engine)
        load.join()
        row.requests += len(chosen)
        if load.answer is None:
            this.problem(f"{where}: the engine died")
            raise EngineError(f"the engine died: {load.error}")
        if fault.inside:
            this.check_alive(where)
        around.heal()
        this.check_answer(row, where, chosen, aborted, load.answer)
        measured = engine.call("measured")
        this.note_spans(row, load.answer, measured, frozen)
        row.leaked += engine.call("quiet")
        row.hit_tokens += int(engine.call("hits") - hits)
        this.check_daemons(where, attached=True, fenced=not fault.inside)
        if around.deaths > deaths:
            engine.call("trim")
            self._survivor.look(engine.pid)
        _say_moment(where, row, load)


def _say_moment(where: str, row: Row, load: Load) -> None:
    seconds = load.answer["seconds"] if load.answer else 0.0
    say(
        f"{where}: {seconds:.1f} s; so far wrong {row.wrong}, leaked {row.leaked}, "
        f"hung {row.hung}, worst step {row.step_s:.2f} s, worst hook {row.hook_s:.2f} s {row.hook}"
    )
