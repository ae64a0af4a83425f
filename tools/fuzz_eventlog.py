"""Throws broken event logs at the reader: it must neither crash, nor hang, nor eat memory.

    python tools/fuzz_eventlog.py --count 1000000 [--seed 0] [--seconds 3600]

Every input begins as a good log and is then damaged: bits, bytes, cuts, doubled and moved parts,
wrong lengths; frames whose checksum is right and whose payload is not; values of the right kind,
out of all bounds; compressed files. Each is opened, read record by record and decoded as
``kvreplay`` does, and its records are counted by ``scan``. The only exception that may come out is
``LogFormatError``. A memory limit for the process and an alarm for each input stand behind that.

The last input lies in the work folder, and a failure prints its number: with the same seed and
``--only N`` it comes again.
"""

import argparse
import gzip
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

import msgspec

from kvcommon.errors import LogFormatError
from kvcommon.eventlog import LogHeader, LogWriter, make_header
from kvcommon.eventlog.format import FRAME, PREAMBLE, checksum
from kvcommon.messages import GroupHit, JobEnd, JobOutcome, JobsEnded, LookupResult
from kvreplay.loading import open_logs
from kvreplay.scan import Wanted, scan
from kvreplay.stats import gather
from kvreplay.story import NoSuchRequestError, find_request, tell
from kvsched.core.core import CoreConfig, SchedCore
from kvsched.core.events import JobsReported, LookupAnswered, MatchAsked, RequestAdded
from kvworker.core.core import CoreConfig as WorkerConfig
from kvworker.core.core import WorkerCore
from kvworker.core.events import SchedulerSaid, Ticked

#: No input may take longer, nor the whole process more memory beyond what it has at its start.
INPUT_S: Final = 10
MEMORY_BYTES: Final = 1 << 30
#: Doubled parts of doubled parts can grow without end; reading takes time in proportion.
MAX_INPUT_BYTES: Final = 4 << 20
_ODD: Final = (
    0,
    1,
    -1,
    255,
    2**31,
    2**32,
    -(2**63),
    2**64 - 1,
    "",
    "x" * 70000,
    b"",
    None,
    True,
    1.5,
)


def _header(core: Literal["kvsched", "kvworker"], name: str, config: msgspec.Struct) -> LogHeader:
    """The header of a run whose time and process are always the same: so are all inputs then."""
    header = make_header(core, name, 1, config, versions={"a": "b"})
    return msgspec.structs.replace(header, pid=1, wall_ns=1, mono_ns=1, info={})


def good_logs(directory: Path) -> list[bytes]:
    """Return two small good logs."""
    found = []
    sched = CoreConfig()
    writer = LogWriter(directory, _header("kvsched", "s", sched))
    core = SchedCore(sched)
    hits = (GroupHit(group=0, num_blocks=2),)
    events: list[Any] = [
        RequestAdded(now_ns=1, request_id="req", num_tokens=100, block_hashes=(b"h" * 32,) * 6),
        MatchAsked(now_ns=2, request_id="req", num_tokens=100, num_local_tokens=0),
        LookupAnswered(now_ns=3, rank=0, result=LookupResult(lookup_id=1, hits=hits)),
        JobsReported(now_ns=4, rank=0, ends=(JobEnd(job_id=1, outcome=JobOutcome.DONE),)),
    ]
    for seq, event in enumerate(events * 3, start=1):
        writer.record(seq, f"w:{seq}", event, core.handle(event) if seq < 3 else [])
    writer.close()
    found.append(writer.path.read_bytes())
    config = WorkerConfig(device="cpu:0", store="memory")
    writer = LogWriter(directory, _header("kvworker", "w", config))
    daemon = WorkerCore(config)
    ends = JobsEnded(ends=(JobEnd(job_id=7, outcome=JobOutcome.FAILED, failed_blocks=(1, 2)),))
    said = SchedulerSaid(now_ns=5, engine="e#0", epoch=1, body=ends)  # type: ignore[arg-type]
    for seq in range(1, 7):
        tick = Ticked(now_ns=seq)
        writer.record(seq, "", tick if seq % 2 else said, daemon.handle(tick))
    writer.close()
    found.append(writer.path.read_bytes())
    return found


def frames_of(data: bytes) -> list[bytes]:
    """Return the payloads of a good log."""
    at, payloads = len(PREAMBLE), []
    while at < len(data):
        length, _ = FRAME.unpack_from(data, at)
        payloads.append(data[at + FRAME.size : at + FRAME.size + length])
        at += FRAME.size + length
    return payloads


def build(payloads: Sequence[bytes]) -> bytes:
    """Make a log with right checksums of any payloads."""
    out = bytearray(PREAMBLE)
    for payload in payloads:
        out += FRAME.pack(len(payload), checksum(payload, len(out))) + payload
    return bytes(out)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Damage bytes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 50))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + 4] = rng.choice((0, 1, 2**24, 2**31, 2**32 - 1)).to_bytes(4, "little")
        elif kind == 2:
            del out[at : at + rng.randrange(40)]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.randrange(40))
        elif kind == 4:
            out[at:at] = out[at : at + rng.randrange(300)] * rng.choice((1, 2, 20))
        elif kind == 5:
            del out[at:]
        elif at < len(out):
            out[at] = rng.randrange(256)
        if not out:
            break
    return bytes(out)


def mutate_values(value: Any, rng: random.Random, depth: int = 0) -> Any:  # noqa: ANN401
    """Change values, keeping the shape most of the time."""
    if rng.random() < 0.04:
        return rng.choice(_ODD)
    if depth < 40 and rng.random() < 0.01:
        for _ in range(rng.choice((1, 30, 700))):
            value = [value]
        return value
    if isinstance(value, dict):
        return {key: mutate_values(one, rng, depth + 1) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        kept = [mutate_values(one, rng, depth + 1) for one in value if rng.random() > 0.02]
        return kept * (_times(kept, rng) if rng.random() < 0.01 else 1)
    return value


def _times(kept: list[Any], rng: random.Random) -> int:
    """How often to repeat values: lists of lists of lists would grow beyond all memory."""
    times = rng.choice((2, 1000))
    return times if len(msgspec.msgpack.encode(kept)) * times <= MAX_INPUT_BYTES else 1


def mutate_frames(data: bytes, rng: random.Random) -> bytes:
    """Make a log whose checksums are right and whose content is not."""
    payloads = frames_of(data)
    for _ in range(rng.choice((1, 2, 5))):
        at = rng.randrange(len(payloads))
        kind = rng.randrange(5)
        if kind == 0:
            payloads[at] = mutate_bytes(payloads[at], rng) or b"\x90"
        elif kind == 1:
            payloads[at] = rng.randbytes(rng.randrange(1, 60))
        elif kind == 2:
            payloads.insert(at, payloads[rng.randrange(len(payloads))])
        elif kind == 3:
            deep = rng.choice((10, 500, 60_000))
            payloads[at] = rng.choice((b"\x91", b"\x81\xa1a", b"\xdd\x7f\xff\xff\xff")) * deep
        else:
            try:
                changed = mutate_values(msgspec.msgpack.decode(payloads[at]), rng)
                payloads[at] = msgspec.msgpack.encode(changed)
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError):
                payloads[at] = b"\xc1"
    return build(payloads)


def mutate_packed(data: bytes, rng: random.Random) -> bytes:
    """Make a broken compressed log."""
    return mutate_bytes(gzip.compress(data, 1, mtime=0), rng)


MUTATIONS: Final[tuple[Callable[[bytes, random.Random], bytes], ...]] = (
    mutate_bytes, mutate_bytes, mutate_frames, mutate_frames, mutate_packed,
)  # fmt: skip


def make_input(goods: Sequence[bytes], seed: int, number: int) -> tuple[str, bytes]:
    """Return file name and bytes of one input."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - repeatable, not secret
    mutation = rng.choice(MUTATIONS)
    suffix = ".gz" if mutation is mutate_packed else ""
    return f"x.0.kvlog{suffix}", mutation(rng.choice(goods), rng)[:MAX_INPUT_BYTES]


def read(path: Path, number: int) -> int:
    """Read one input in every way; return the number of records that could be read."""
    logs = open_logs([path])
    num_records = 0
    for log in logs.logs:
        num_records += sum(1 for _ in log)
    try:
        scan(logs, Wanted(from_ns=1, to_ns=10))
        if number % 10 == 0:
            gather(logs)
            tell(logs, find_request(logs, "req"))
    except (NoSuchRequestError, LogFormatError):
        pass
    return num_records


def run(numbers: range, seed: int, seconds: float, folder: Path) -> int:
    """Read the inputs of these numbers; return the number of records that could be read.

    Raises:
        Exception: whatever the reader raised, with the input's number noted in its text.
    """
    goods = good_logs(folder / "good")
    signal.signal(signal.SIGALRM, _hangs)
    num_records = 0
    deadline = time.monotonic() + seconds
    for number in numbers:
        name, data = make_input(goods, seed, number)
        path = folder / name
        path.write_bytes(data)
        signal.alarm(INPUT_S)
        try:
            num_records += read(path, number)
        except BaseException:
            sys.stderr.write(f"input {number} of seed {seed} failed: {path}\n")
            raise
        finally:
            signal.alarm(0)
        if time.monotonic() > deadline:
            print(f"time is up after input {number}")
            break
    return num_records


def limit_memory() -> None:
    """Let this process have so much more memory than it has now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, resource.RLIM_INFINITY))


def _hangs(_signum: int, _frame: FrameType | None) -> None:
    raise TimeoutError(f"an input takes longer than {INPUT_S} s")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    chosen = parser.parse_args()
    limit_memory()
    began = time.monotonic()
    shm = "/dev/shm"  # noqa: S108 - a place in memory, the folder in it is ours
    with tempfile.TemporaryDirectory(dir=shm if Path(shm).is_dir() else None) as name:
        numbers = range(chosen.first, chosen.first + chosen.count)
        if chosen.only is not None:
            numbers = range(chosen.only, chosen.only + 1)
        found = run(numbers, chosen.seed, chosen.seconds, Path(name))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{len(numbers)} inputs, {found} records read, {time.monotonic() - began:.0f} s, "
        f"at most {peak} MiB"
    )


if __name__ == "__main__":
    main()
