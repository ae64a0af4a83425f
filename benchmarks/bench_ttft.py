"""Time to first token of one 3,000-token prompt: what does a connector cost, and what does it save?

Measured on the real vLLM (CPU) with a tiny Llama of 8 layers, 256 wide, 16 KiB of KV per token:
no connector, vLLM's in-tree ``MooncakeStoreConnector``, kvferry inline, kvferry with its daemon.
Three cases each, every time with a prompt never seen before:

* cold: nothing is stored; with a connector this includes saving;
* local hit: the same prompt again, the prefix is in vLLM's own cache;
* external hit: again after that cache was reset, the prefix comes from the store (without a
  connector: computed again).

All engines live at once and are asked in turn (A B C D, A B C D, …), each only when everything is
idle. A repeat counts if other processes used less than 0.2 core meanwhile; a noisy one is done
again while there is patience (``--wait-s``), and then counts but is shown as noisy. Hit lengths
must be equal between connectors, and tokens and logprobs equal to those of the engine without one;
a changed prompt must give others.
"""

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import servers
from benchmarks import common, engines

CASES = ("cold", "local", "external")
TOLERANCE = 1e-4
#: vLLM's block size on CPU.
BLOCK_TOKENS = 128
console = Console(width=120)


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The three cases of one prompt on one engine."""

    variant: str
    round: int
    seed: int
    ms: dict[str, float]
    cached: dict[str, int]
    answers: dict[str, tuple[int, float]]
    foreign_cores: float
    noisy: bool


def run_repeat(
    engine: engines.Engine, patience: common.Patience, round_: int, seed: int, num_tokens: int
) -> Repeat:
    """Run one fresh prompt through the three cases."""
    ms: dict[str, float] = {}
    cached: dict[str, int] = {}
    answers: dict[str, tuple[int, float]] = {}
    uses: list[common.CpuUse] = []
    for case in CASES:
        if case == "external":
            engine.order("reset")
        patience.settle()
        with common.metered(uses):
            answer = engine.order("generate", seed=seed, num_tokens=num_tokens)
        ms[case] = answer["seconds"] * 1000
        cached[case] = answer["cached"]
        answers[case] = (answer["tokens"][0], answer["logprobs"][0])
    foreign = max(use.foreign for use in uses)
    noisy = not all(use.quiet for use in uses)
    return Repeat(engine.name, round_, seed, ms, cached, answers, foreign, noisy)


def quiet_repeat(
    engine: engines.Engine, patience: common.Patience, round_: int, seed: int, num_tokens: int
) -> Repeat:
    """Run a repeat, again with other prompts while it is noisy; the quietest if it always is."""
    best = run_repeat(engine, patience, round_, seed, num_tokens)
    while best.noisy and patience.left_s > 0:
        seed += 1000
        with patience.retrying():
            other = run_repeat(engine, patience, round_, seed, num_tokens)
        best = min(best, other, key=lambda each: each.foreign_cores)
    return best


def reference_answers(
    engine: engines.Engine, repeats: list[Repeat], num_tokens: int
) -> dict[int, tuple[int, float]]:
    """Compute every prompt once on the engine without a connector."""
    answers = {}
    for seed in sorted({each.seed for each in repeats}):
        engine.order("reset")
        answer = engine.order("generate", seed=seed, num_tokens=num_tokens)
        answers[seed] = (answer["tokens"][0], answer["logprobs"][0])
    return answers


def problems(
    repeats: list[Repeat], reference: dict[int, tuple[int, float]], num_tokens: int
) -> list[str]:
    """Say what makes the numbers worthless: other hit lengths, or other answers."""
    full = (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    found = []
    for each in repeats:
        external = 0 if each.variant == "none" else full
        wanted = {"cold": 0, "local": full, "external": external}
        if each.cached != wanted:
            found.append(f"{each.variant}: tokens hit {each.cached}, not {wanted}")
        token, logprob = reference[each.seed]
        for case, (other, mark) in each.answers.items():
            if other != token or abs(mark - logprob) > TOLERANCE:
                text = f"({other}, {mark:.6f}), not ({token}, {logprob:.6f})"
                found.append(f"{each.variant}: {case}: another answer: {text}")
    # Negative control: this comparison can fail.
    marks = list(reference.values())
    for one, two in itertools.pairwise(marks):
        if one[0] == two[0] and abs(one[1] - two[1]) <= TOLERANCE:
            found.append("two different prompts gave the same answer: the comparison is blind")
    return found


def ratios(repeats: list[Repeat], case: str, variant: str, base: str) -> common.Summary:
    """Summarise, over rounds, the medians of a variant divided by those of another."""
    values = []
    for round_ in sorted({each.round for each in repeats}):
        of = {
            name: common.summarise(
                [each.ms[case] for each in repeats if (each.round, each.variant) == (round_, name)]
            ).median
            for name in (variant, base)
        }
        if of[variant] and of[base]:
            values.append(of[variant] / of[base])
    return common.summarise(values)


def summary(repeats: list[Repeat], names: list[str]) -> list[dict[str, Any]]:
    """One row per variant and case."""
    rows = []
    for case in CASES:
        for name in names:
            mine = [each for each in repeats if each.variant == name]
            row: dict[str, Any] = {
                "case": case,
                "variant": name,
                "ms": dataclasses.asdict(common.summarise([each.ms[case] for each in mine])),
                "tokens_hit": sorted({each.cached[case] for each in mine}),
                "noisy": sum(each.noisy for each in mine),
            }
            for base in ("none", "in-tree"):
                if base in names:
                    ratio = ratios(repeats, case, name, base)
                    row[f"over_{base}"] = dataclasses.asdict(ratio)
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="Time to first token, ms: median (lowest-highest)")
    for column in ("case", "variant", "ms", "/ none", "/ in-tree", "tokens hit", "noisy"):
        table.add_column(column, justify="left" if column in {"case", "variant"} else "right")
    last = rows[0]["case"] if rows else ""
    for row in rows:
        if row["case"] != last:
            table.add_section()
            last = row["case"]
        cells = [row["case"], row["variant"], common.Summary(**row["ms"]).text()]
        cells += [
            common.Summary(**row[base]).text(2) if base in row else "-"
            for base in ("over_none", "over_in-tree")
        ]
        hit = "/".join(map(str, row["tokens_hit"]))
        table.add_row(*cells, hit, f"{row['noisy']} of {row['ms']['count']}")
    console.print(table)


def main(
    *,
    rounds: Annotated[int, typer.Option(help="Rounds over all variants.")] = 5,
    repeats: Annotated[int, typer.Option(help="Prompts per variant and round.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 3000,
    variants: Annotated[
        str, typer.Option(help="Which, separated by commas; see engines.VARIANTS.")
    ] = ",".join(engines.VARIANTS),
    wait_s: Annotated[
        float, typer.Option(help="Seconds in all to wait for quiet and to measure noise again.")
    ] = 600,
    event_logs: Annotated[
        bool, typer.Option(help="Keep kvferry's event logs in the output folder, for kvreplay.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = Path("bench-out"),
) -> None:
    """Measure the time to first token of each variant."""
    names = variants.split(",")
    done: list[Repeat] = []
    patience = common.Patience(wait_s)
    servers.end_on_sigterm()
    with contextlib.ExitStack() as stack:
        config = engines.EngineConfig(
            model=out / "model", event_logs=str(out.resolve() / "events") if event_logs else ""
        )
        console.print(f"starting {len(names)} engines")
        running = stack.enter_context(engines.running(names, config, out / "logs"))
        for engine in running.values():
            run_repeat(engine, common.Patience(0), -1, 1, tokens)
        for round_ in range(rounds):
            for turn in range(repeats):
                seed = 10_000 + 100 * round_ + turn
                for engine in running.values():
                    each = quiet_repeat(engine, patience, round_, seed, tokens)
                    done.append(each)
                    shown = "  ".join(f"{case} {each.ms[case]:7.1f}" for case in CASES)
                    mark = f"  noisy: {each.foreign_cores:.2f} core" if each.noisy else ""
                    console.print(f"round {round_} {engine.name:15} {shown}{mark}")
        judge = running.get("none") or next(iter(running.values()))
        reference = reference_answers(judge, done, tokens)
    wrong = problems(done, reference, tokens)
    rows = summary(done, names)
    show(rows)
    content: dict[str, object] = {
        "settings": {"rounds": rounds, "repeats": repeats, "tokens": tokens},
        "problems": wrong,
        "summary": rows,
        "repeats": [dataclasses.asdict(each) for each in done],
    }
    console.print(common.write_json("ttft", content, out))
    for line in wrong:
        console.print(f"[red]{line}")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
