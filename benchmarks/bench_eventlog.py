"""What does recording cost, and how fast are large logs read?

Measured, recording on and off side by side in one run:

1. *Cores*: the events of recorded histories of a real engine and its daemon (``tests/histories``)
   go through fresh cores, in turns with and without a log. The difference per event, times the
   events per step, is set against the recorded time of a step. Aim: 1 % for the engine, 2 % for the
   daemon.
2. *Daemons*: two real daemons, one with and one without a log, carry out the same save and load
   steps in turns. Shown: median time per step, and CPU time per step of each process.
3. *Reading*: a log of 10 million records is filtered and summarised (``kvreplay stats --quick``) by
   a process of its own. Shown: records per second of wall and of CPU time, and its peak memory.
   Aim: 500,000 records a second.
"""

import contextlib
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import common
from kvcommon.eventlog import LogWriter, Recorder, make_header, read_log
from kvcommon.ids import new_epoch
from kvcommon.keys import Namespace
from kvcommon.layout import CacheLayout, GroupLayout, Layer, Plane
from kvcommon.memory.handles import LocalHandle, PageHandle
from kvcommon.messages import Attach, Hello, LayersComputed, StepBegun, StepPlan, StepVerdict
from kvreplay.drive.daemon import Daemon
from kvreplay.drive.link import Links
from kvreplay.drive.outcomes import Tally
from kvreplay.drive.rank import Rank, Setting, load_job, save_job
from kvreplay.loading import Entry, Log, open_logs
from kvreplay.verify import CORES
from kvsched.core.events import StepFinished, StepScheduled
from kvworker.core.core import CoreConfig

HISTORY = common.ROOT / "tests" / "histories" / "real" / "mooncake"
AIMS = {"kvsched": 0.01, "kvworker": 0.02}
AIM_RECORDS_S = 500_000
NUM_LAYERS, NUM_BLOCKS, LAYER_BYTES = 16, 64, 32 << 10
#: ``kvreplay`` as a process that says at its end how much memory it had.
COUNT = """
import atexit, resource, sys
peak = lambda: sys.stderr.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
atexit.register(peak)
from kvreplay.cli import main
main()
"""
console = Console(width=110)


def core_round(log: Log, entries: list[Entry], directory: Path | None) -> float:
    """Put a log's events through a fresh core; return µs per event."""
    core = CORES[log.header.core](log.header.config)
    writer = LogWriter(directory, log.header) if directory is not None else None
    recorder = Recorder[Any, Any](core, writer, log.header.name)
    began = time.perf_counter_ns()
    for entry in entries:
        recorder.handle(entry.event, entry.cause)
    if writer is not None:
        writer.flush()
    spent = time.perf_counter_ns() - began
    if writer is not None:
        writer.close()
    return spent / len(entries) / 1000


def step_times_us(entries: list[Entry]) -> list[float]:
    """Return how long recorded steps took, as the scheduler side saw them."""
    begun: dict[int, int] = {}
    found = []
    for entry in entries:
        event = entry.event
        if isinstance(event, StepScheduled):
            begun[event.step] = event.now_ns
        elif isinstance(event, StepFinished) and event.step in begun:
            found.append((event.now_ns - begun.pop(event.step)) / 1000)
    return found


def bench_cores(rounds: int) -> list[dict[str, Any]]:
    """Compare cores with and without a log."""
    logs = open_logs([HISTORY]).logs
    by_log = {log.label: list(log) for log in logs}
    steps = [us for log in logs for us in step_times_us(by_log[log.label])]
    step_us = statistics.median(steps)
    results = []
    for log in logs:
        entries = by_log[log.label]
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * rounds):
            recorded = bool(number % 2)
            with tempfile.TemporaryDirectory() as name:
                where = Path(name) if recorded else None
                times[recorded].append(core_round(log, entries, where))
        off, on = (statistics.median(times[recorded]) for recorded in (False, True))
        per_step = len(entries) / len(steps)
        share = max(0.0, on - off) * per_step / step_us
        results.append(
            {
                "core": log.header.core,
                "off_us_per_event": off,
                "on_us_per_event": on,
                "events_per_step": per_step,
                "step_us": step_us,
                "share": share,
                "aim": AIMS[log.header.core],
            }
        )
    return results


def layout() -> CacheLayout:
    """Return the cache of a small model."""
    layers = tuple(
        Layer(
            name=f"layer{index}",
            planes=(
                Plane(
                    storage=0,
                    dtype="torch.uint8",
                    shape=(NUM_BLOCKS, LAYER_BYTES),
                    stride=(LAYER_BYTES, 1),
                    offset=index * NUM_BLOCKS * LAYER_BYTES,
                    block_stride=LAYER_BYTES,
                    segments=((0, LAYER_BYTES),),
                ),
            ),
        )
        for index in range(NUM_LAYERS)
    )
    group = GroupLayout(group=0, block_size=16, num_blocks=NUM_BLOCKS, layers=layers)
    return CacheLayout(groups=(group,), storage_bytes=(NUM_LAYERS * NUM_BLOCKS * LAYER_BYTES,))


def attach() -> Attach:
    """Return an attach; ``Rank`` fills in its own memory."""
    namespace = Namespace(
        model="bench",
        revision="1",
        dtype="uint8",
        cache_dtype="auto",
        block_sizes=(16,),
        layout=("bench",),
        layers=(0, NUM_LAYERS),
        tensor_parallel=1,
        pipeline_parallel=1,
        rank=(0, 0),
        hash_algorithm="sha256",
        hash_seed="0",
    )
    nowhere = LocalHandle(address=0, size=0)
    return Attach(
        pid=0,
        device="cpu:0",
        storages=(nowhere,),
        layout=layout(),
        page=PageHandle(storage=nowhere),
        namespace=namespace,
    )


@dataclasses.dataclass
class Served:
    """One daemon and an engine's rank on it."""

    daemon: Daemon
    rank: Rank
    links: Links
    tally: Tally
    step: int = 0
    times_us: list[float] = dataclasses.field(default_factory=list)

    def pair(self) -> None:
        """Save eight blocks in one step, layer by layer, and load them in the next."""
        self.step += 2
        first, second = self.step - 1, self.step
        blocks = [(block, f"{first}/{block}".encode().ljust(32)) for block in range(1, 9)]
        began = time.perf_counter_ns()
        self.rank.scheduler(StepPlan(step=first, saves=(save_job(first, 0, blocks),)))
        self.rank.model(StepBegun(step=first))
        for layer in range(NUM_LAYERS):
            self.rank.model(LayersComputed(step=first, num_layers=layer + 1))
        self.rank.scheduler(StepVerdict(step=first))
        self.until(first)
        self.rank.scheduler(StepPlan(step=second, loads=(load_job(second, 0, blocks),)))
        self.rank.model(StepBegun(step=second))
        self.until(second)
        self.times_us.append((time.perf_counter_ns() - began) / 2000)

    def until(self, job: int) -> None:
        """Wait until a job has ended."""
        while job in self.rank.open_jobs:
            self.hear()

    def hear(self) -> None:
        """Take in what the daemon says."""
        for _, body in self.links.hear(5.0):
            self.rank.heard(body)

    def cpu_s(self) -> float:
        """CPU time of the daemon's process."""
        times = psutil.Process(self.daemon.pid).cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def served(directory: Path, device: str, options: list[str]) -> Iterator[Served]:
    """Run a daemon with an attached rank."""
    with Daemon(directory, device, ["--store", "memory", *options], validate=False) as daemon:
        links, tally = Links(), Tally()
        setting = Setting(links, 0, "bench", device, daemon.endpoint, tally)
        rank = Rank("bench#0", setting)
        try:
            rank.attach(attach(), new_epoch())
            one = Served(daemon, rank, links, tally)
            while rank.attached is None:
                one.hear()
            rank.hello(Hello(pid=0, ranks=()), new_epoch(), {})
            yield one
        finally:
            rank.close()
            links.close()


def bench_daemons(rounds: int) -> list[dict[str, Any]]:
    """Compare two daemons, in turns."""
    with tempfile.TemporaryDirectory(prefix="kvb") as name:
        folder = Path(name)
        log = ["--event-log", str(folder / "logs")]
        with served(folder, "cpu:0", []) as off, served(folder, "cpu:1", log) as on:
            both = {"off": off, "on": on}
            for one in (off, on) * 5:
                one.pair()
            before = {title: one.cpu_s() for title, one in both.items()}
            for one in both.values():
                one.times_us.clear()
            for number in range(rounds):
                for one in (off, on) if number % 2 else (on, off):
                    one.pair()
            return [
                {
                    "recording": title,
                    "step_us": dataclasses.asdict(common.summarise(one.times_us)),
                    "cpu_us_per_step": (one.cpu_s() - before[title]) / (2 * rounds) * 1e6,
                    "faults": one.tally.num_faults,
                }
                for title, one in both.items()
            ]


def write_large(directory: Path, num_records: int) -> int:
    """Write a log of so many records of a real daemon; return its bytes."""
    (source,) = (log for log in open_logs([HISTORY]).logs if log.header.core == "kvworker")
    records = [
        (raw.cause, raw.event, raw.commands) for part in source.parts for raw in read_log(part.path)
    ]
    config = CoreConfig(device="cpu:0", store="memory")
    header = make_header("kvworker", "large", 1, config, versions={})
    writer = LogWriter(directory, header, max_files=1000)
    for seq in range(num_records):
        cause, event, commands = records[seq % len(records)]
        writer.record(seq + 1, cause, event, commands)  # type: ignore[arg-type]
    writer.close()
    return sum(path.stat().st_size for path in directory.iterdir())


def bench_reading(num_records: int) -> list[dict[str, Any]]:
    """Count a large log, whole and filtered, in a process of its own."""
    results = []
    with tempfile.TemporaryDirectory(prefix="kvb") as name:
        num_bytes = write_large(Path(name), num_records)
        for title, options in (
            ("all", []),
            ("kind", ["--kind", "LayersLoaded"]),
            ("time", ["--from", "1", "--to", "10"]),
        ):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            began = time.perf_counter()
            command = [sys.executable, "-c", COUNT, "stats", name, "--quick", "--json", *options]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            wall = time.perf_counter() - began
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found = json.loads(done.stdout)
            results.append(
                {
                    "filter": title,
                    "records": found["records"],
                    "wanted": found["wanted"],
                    "bytes": num_bytes,
                    "records_per_wall_s": num_records / wall,
                    "records_per_cpu_s": num_records / cpu,
                    "peak_mib": int(done.stderr) / 1024,
                    "aim": AIM_RECORDS_S,
                }
            )
    return results


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    table = Table("core", "off µs/event", "on µs/event", "events/step", "share of a step", "aim")
    for row in result["cores"]:
        numbers = (row["off_us_per_event"], row["on_us_per_event"], row["events_per_step"])
        shares = (f"{row['share']:.3%}", f"{row['aim']:.0%}")
        table.add_row(row["core"], *(f"{one:.2f}" for one in numbers), *shares)
    console.print(table)
    table = Table("daemon, recording", "step µs, median (range)", "CPU µs/step")
    for row in result["daemons"]:
        times = common.Summary(**row["step_us"])
        table.add_row(row["recording"], times.text(0), f"{row['cpu_us_per_step']:.0f}")
    console.print(table)
    table = Table("reading", "records", "wanted", "records/s", "records/CPU s", "peak MiB")
    for row in result["reading"]:
        speeds = (f"{row[name]:,.0f}" for name in ("records_per_wall_s", "records_per_cpu_s"))
        counts = (f"{row['records']:,}", f"{row['wanted']:,}")
        table.add_row(row["filter"], *counts, *speeds, f"{row['peak_mib']:.0f}")
    console.print(table)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the JSON file.")] = Path("bench-out"),
    rounds: Annotated[int, typer.Option(help="Rounds of cores and daemons.")] = 200,
    records: Annotated[int, typer.Option(help="Records of the large log.")] = 10_000_000,
) -> None:
    """Measure, print, and write bench-out/bench_eventlog.json."""
    uses: list[common.CpuUse] = []
    with common.metered(uses):
        result: dict[str, Any] = {
            "cores": bench_cores(rounds),
            "daemons": bench_daemons(rounds),
            "reading": bench_reading(records),
        }
    result |= {"machine": common.machine(), "commit": common.commit()}
    result["foreign_cores"] = uses[0].foreign
    show(result)
    console.print(f"other processes used {uses[0].foreign:.1f} cores meanwhile")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "bench_eventlog.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console.print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
