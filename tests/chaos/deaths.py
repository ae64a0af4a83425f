"""Moments that no engine survives: each proves that the last death did no harm, then dies."""

import time

from tests.chaos.faults import KINDS
from tests.chaos.leftovers import Survivor
from tests.chaos.round import MAX_TOKENS, PROMPTS, Round, say
from tests.chaos.victim import Load, Victim

#: How long the client of a dying engine may wait for its error. vLLM gives its own processes
#: several seconds to end.
ERROR_S = 60.0


class Succession:
    """Engines of one setting, one after the other, under the same daemons."""

    def __init__(self, this: Round, daemon: Survivor) -> None:
        self._round = this
        self._daemon = daemon
        self._deaths = this.around.deaths

    def run(self, kinds: list[str]) -> None:
        """One engine per kind, and one more that proves the last.

        The core has a process of its own where it is the victim. Where a worker is, the core is the
        client's process: it is sooner there, and its hooks can be measured.
        """
        before, around = "", self._round.around
        for number, kind in enumerate([*kinds, ""]):
            with self._round.engine(in_process=self._round.ranks > 1) as engine:
                engine.call("measure")
                self._prove(engine, before, number)
                if kind:
                    self._die(engine, kind, number)
                where = f"{kind or 'the last engine'}, moment {number}"
                self._round.check_alive(where)
                self._round.bury(engine, where)
            if around.deaths > self._deaths:
                # Another process: what it has open says nothing about the one before.
                self._deaths = around.deaths
                self._daemon.samples.clear()
            self._daemon.look(around.daemons[around.devices[0]].pid)
            before = kind

    def _prove(self, engine: Victim, before: str, number: int) -> None:
        """Serve what the engine before has served, partly from the store."""
        this = self._round
        where = f"after {before or 'nothing'}, moment {number}"
        chosen = list(range(len(PROMPTS)))
        this.rng.shuffle(chosen)
        load = Load(
            engine,
            "mixed",
            prompts=[PROMPTS[index] for index in chosen],
            max_tokens=MAX_TOKENS,
            aborted=[],
            prefix="proof",
        )
        load.run()
        if load.answer is None:
            this.problem(f"{where}: the next engine does not serve: {load.error}")
            return
        leaked, hits = engine.call("quiet"), int(engine.call("hits"))
        measured = engine.call("measured")
        this.check_alive(where)
        this.check_daemons(where, attached=True)
        if not before:
            return
        row = this.table.row(before)
        row.requests += len(chosen)
        this.check_answer(row, where, chosen, [], load.answer)
        this.note_spans(row, load.answer, measured)
        row.leaked += leaked
        row.hit_tokens += hits
        if not hits:
            this.problem(f"{where}: nothing came from the store")
        say(
            f"{where}: {load.answer['seconds']:.1f} s, {hits} tokens from the store; so far wrong "
            f"{row.wrong}, leaked {row.leaked}, hung {row.hung}, worst step {row.step_s:.2f} s, "
            f"worst hook {row.hook_s:.2f} s {row.hook}"
        )

    def _die(self, engine: Victim, kind: str, number: int) -> None:
        this = self._round
        row = this.table.row(kind)
        # More than it can serve before it dies.
        chosen = this.chosen(36)
        load = Load(
            engine,
            "mixed",
            prompts=[PROMPTS[index] for index in chosen],
            max_tokens=4 * MAX_TOKENS,
            aborted=[],
            prefix="last",
        )
        load.start()
        time.sleep(this.rng.uniform(0.2, 1.5))
        struck = time.monotonic()
        row.idle += not load.is_alive()
        KINDS[kind].strike(this.around, engine)
        load.join(ERROR_S)
        row.moments += 1
        if load.is_alive():
            row.hung += len(chosen)
            this.problem(f"{kind}, moment {number}: the client has no error after {ERROR_S:.0f} s")
            engine.kill()
            load.join()
            return
        say(f"{kind}, moment {number}: the client knew after {load.ended_at - struck:.1f} s")
