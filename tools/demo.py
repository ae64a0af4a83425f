"""The demo: serve a tiny model, keep its KV outside, use it again, and show that nothing changed.

A dialogue behind a long system prompt is held with an engine without kvferry, which says what is
right; with one that has it, cold, again from the engine's own prefix cache, and again from the
store after that cache was reset; and with a second, fresh engine. Text and logprobs must be equal
everywhere, and differ in the control, where the system prompt is another one. Then the event log is
verified and drawn. Everything that was started is ended, also after an error or an interruption.

Exit status: 0 if all is well, 1 if anything differs, 2 if the demo could not be run.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import apiclient
import demo_report
import dialogue
import servers
import tinymodel
from localmaster import LocalMaster, MasterError

SEGMENT_BYTES = 1 << 30
#: So that the first request measured finds a warm engine; shorter than a block, so that nothing of
#: it is stored.
WARM_UP = [{"role": "user", "content": "North east south west. " * 12}]
ENGINE_ARGUMENTS = ("--max-model-len", "4096", "--block-size", str(dialogue.BLOCK_TOKENS))
#: Long bounds: a demo on a busy machine is to wait a little rather than to miss.
CONNECTOR_OPTIONS = {"lookup_timeout_ms": 5000, "load_timeout_ms": 20000}
console = Console(width=110 if not sys.stdout.isatty() else None)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Show what is being done, and how long it took."""
    started = time.monotonic()
    with console.status(f"{text} …"):
        yield
    console.print(f"  [green]✓[/] {text} [dim]({time.monotonic() - started:.1f} s)")


class Demo:
    """All that the demo starts and finds.

    Args:
        store: ``mooncake`` or ``memory``.
        out: Folder of the results.
        run_dir: Run directory of the daemon: private, and short enough for sockets.
    """

    def __init__(self, store: str, out: Path, run_dir: Path) -> None:
        self.out = out
        self.logs = out / "logs"
        self.results = demo_report.Results()
        self._store = store
        self._run_dir = run_dir
        self._model = out / "model"
        self._servers: list[servers.ServerProcess] = []

    def run(self) -> None:
        """Hold all dialogues."""
        with step("making a tiny Llama: 8 layers, 256 wide, random weights"):
            tinymodel.make_model(self._model)
        with contextlib.ExitStack() as stack:
            arguments = ["--store", self._store, "--event-log", str(self.logs)]
            if self._store == "mooncake":
                with step("starting mooncake_master"):
                    master = stack.enter_context(LocalMaster())
                config = demo_report.write_mooncake_config(self.out, master.address, SEGMENT_BYTES)
                arguments += ["--mooncake-config", str(config)]
            with step(f"starting kvworker for cpu:0 with store {self._store}"):
                daemon = servers.DaemonProcess(
                    self._run_dir, self.out / "kvworker.log", arguments=arguments
                )
                stack.enter_context(self._known(daemon))
            with contextlib.ExitStack() as first:
                with step("starting two engines: vLLM alone, and vLLM with kvferry"):
                    plain = self._engine("plain", connector=False)
                    engine = self._engine("first")
                    for server in (plain, engine):
                        first.push(server)
                        server.launch()
                    for server in (plain, engine):
                        first.enter_context(server)
                answers = self._without_connector(plain)
                plain.stop()
                self._first_engine(engine, answers)
            with step("starting a second, fresh engine"):
                second = self._engine("second")
                stack.enter_context(second)
            self._second_engine(second, answers)
        for known in self._servers:
            self.results.wrong += [f"{known.name} left {path}" for path in known.leftovers()]

    def _known(self, server: servers.DaemonProcess) -> servers.DaemonProcess:
        self._servers.append(server)
        return server

    def _engine(self, name: str, *, connector: bool = True) -> servers.VllmServer:
        extra = {"daemons": "auto", "run_dir": str(self._run_dir), **CONNECTOR_OPTIONS}
        kv_transfer = {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvsched.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        server = servers.VllmServer(
            self._model,
            self.out / f"vllm-{name}.log",
            kv_transfer=kv_transfer if connector else None,
            arguments=ENGINE_ARGUMENTS,
            name=f"vLLM ({name})",
        )
        self._servers.append(server)
        return server

    def _without_connector(self, plain: servers.VllmServer) -> list[str]:
        with step("the dialogue without kvferry: this is what is right"):
            apiclient.chat(plain.url, WARM_UP, max_tokens=2)
            turns = dialogue.hold(plain.url)
            self.results.reference = turns
            self.results.add("vLLM alone", turns)
        return [turn.reply.text for turn in turns]

    def _first_engine(self, engine: servers.VllmServer, answers: list[str]) -> None:
        apiclient.chat(engine.url, WARM_UP, max_tokens=2)
        with step("the dialogue with kvferry, cold: KV is saved layer by layer"):
            self.results.add("cold", dialogue.hold(engine.url, answers=answers))
        with step("again, from the engine's own prefix cache"):
            self.results.add("local hit", dialogue.hold(engine.url, answers=answers))
        with step("again, that cache reset before each turn: KV comes from the store"):

            def reset() -> None:
                apiclient.reset_prefix_cache(engine.url)

            turns = dialogue.hold(engine.url, answers=answers, before_turn=reset)
            self.results.add("external hit", turns)
        with step("control: another system prompt must change the answer"):
            other = dialogue.system_prompt("the other ferry")
            self.results.control = dialogue.hold(engine.url, system=other, turns=1)[0]

    def _second_engine(self, second: servers.VllmServer, answers: list[str]) -> None:
        apiclient.chat(second.url, WARM_UP, max_tokens=2)
        with step("the dialogue with the fresh engine: KV comes from the store"):
            self.results.add("fresh engine", dialogue.hold(second.url, answers=answers))

    def replay(self) -> None:
        """Verify the event log, tell one story, and draw."""
        kvreplay = [sys.executable, "-c", "from kvreplay.cli import main; main()"]
        request = self.results.turns["fresh engine"][0].reply.request_id
        trace, picture = self.out / "trace.json", self.out / "overlap.png"
        for title, arguments in (
            ("the event log obeys the rules, and the cores answer the same", ["verify"]),
            (f"the story of request {request}", ["story", request]),
            ("a trace for ui.perfetto.dev", ["trace", "--out", str(trace)]),
            ("a picture of transfers against layers", ["plot", "--out", str(picture)]),
        ):
            command = [arguments[0], str(self.logs), *arguments[1:]]
            console.print(f"\n[bold]{title}[/]\n[dim]$ kvreplay {' '.join(command)}")
            sys.stdout.flush()
            done = subprocess.run([*kvreplay, *command], check=False, timeout=300)
            if done.returncode:
                self.results.wrong.append(f"kvreplay {arguments[0]} ended with {done.returncode}")


def mooncake_problem() -> str:
    """Say why Mooncake cannot be used here; empty if it can."""
    command = [sys.executable, "-c", "import mooncake.store"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    lines = done.stderr.strip().splitlines()
    return lines[-1] if done.returncode and lines else ""


def main(
    store: Annotated[str, typer.Option(help="Store: mooncake, or memory.")] = "mooncake",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("demo-out"),
) -> None:
    """Hold a dialogue with and without kvferry and compare."""
    if store not in {"mooncake", "memory"}:
        raise typer.BadParameter(f"no store {store!r}: mooncake or memory", param_hint="--store")
    servers.end_on_sigterm()
    problem = mooncake_problem() if store == "mooncake" else ""
    if problem:
        console.print(f"[red]Mooncake cannot be loaded: {problem}")
        console.print("Install what is missing (Debian: apt-get install libibverbs1), or run the")
        console.print("demo without Mooncake: make demo STORE=memory")
        raise typer.Exit(2)
    out = out.resolve()
    demo_report.clean(out)
    with tempfile.TemporaryDirectory(prefix="kvf-") as run_dir:
        demo = Demo(store, out, Path(run_dir))
        try:
            demo.run()
        except (servers.ServerError, apiclient.ApiError, MasterError) as error:
            console.print(f"[red]{error}", highlight=False)
            console.print(f"Logs: {out}")
            raise typer.Exit(2) from None
    demo.replay()
    console.print()
    console.print(demo_report.table(demo.results))
    wrong = demo_report.problems(demo.results)
    for line in wrong:
        console.print(f"[red]✗ {line}", highlight=False)
    if not wrong:
        console.print("[green]✓[/] Every answer is the one that vLLM alone gives. Nothing is left.")
        console.print(f"Look at {out}/overlap.png, and at trace.json in ui.perfetto.dev.")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
