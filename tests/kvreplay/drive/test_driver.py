"""A recording is played to real daemons: the same outcomes, and faulty transfer code is found."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcommon.eventlog import LogWriter
from kvreplay.drive.driver import Driver
from kvreplay.drive.errors import DriveError
from kvreplay.drive.stage import Options, Played, Stage
from kvreplay.loading import LogSet, open_logs
from kvreplay.show import Filters, select, step_of
from localmaster import LocalMaster
from tests.e2e.stack import mooncake_file
from tests.kvreplay.drive.recording import record

HISTORIES = Path(__file__).parents[2] / "histories" / "real"
BROKEN = Path(__file__).with_name("broken_daemon.py")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> LogSet:
    return record(tmp_path_factory.mktemp("recording"))


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvr") as name:
        yield Path(name)


def play(logs: LogSet, directory: Path, **options: object) -> Played:
    chosen = {"answer_s": 10.0, "limit_s": 60.0, **options}
    return Driver(logs.logs, Options(directory=directory, **chosen)).play()  # type: ignore[arg-type]


def test_the_same_outcomes_and_every_byte_right(recording: LogSet, short: Path) -> None:
    played = play(recording, short)
    assert played.tally.differences == []
    assert played.tally.faults == []
    assert played.tally.num_same == 8
    assert (played.tally.num_checked, played.num_audited) == (6, 2)


def test_against_a_real_mooncake(recording: LogSet, short: Path) -> None:
    with LocalMaster() as master:
        config = mooncake_file(short, master.address, "64MB")
        store = ("--store", "mooncake", "--mooncake-config", str(config))
        played = play(recording, short, store=store)
    assert (played.tally.differences, played.tally.faults) == ([], [])
    assert (played.tally.num_checked, played.num_audited) == (6, 2)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("saves-swapped", "holds wrong bytes after job"),
        ("loads-swapped", "holds wrong bytes after job 2"),
        ("loads-short", "layer 2 of block 4 holds wrong bytes after job 2"),
        ("loads-scribble", "block 1 was written after job 1 had ended"),
    ],
)
def test_a_fault_in_the_transfer_code_is_found(
    recording: LogSet, short: Path, fault: str, text: str
) -> None:
    played = play(recording, short, program=(sys.executable, str(BROKEN), fault))
    assert played.tally.differences == [], "the daemon believes that all is well"
    assert any(text in one for one in played.tally.faults), played.tally.faults


def test_objects_that_are_gone_at_the_end_are_missed(recording: LogSet, short: Path) -> None:
    """Up to the first load; what was saved is lost behind it, and nobody asks for it any more."""
    first_ns = next(select(recording, Filters(ticks=True))).at_ns
    ends = (entry for entry in select(recording, Filters(job=2, kind="JobsEnded")))
    until_ns = next(ends).at_ns - first_ns
    program = (sys.executable, str(BROKEN), "loads-lose-objects")
    played = play(recording, short, program=program, until_ns=until_ns)
    assert played.tally.differences == []
    assert played.tally.faults == [
        "2 objects that are said to be stored cannot be read back: failed, 2 blocks not (evicted)"
    ]


def without_the_save(logs: LogSet, directory: Path) -> LogSet:
    """The same recording, as if the objects had been stored before it began."""
    (log,) = logs.logs
    writer = LogWriter(directory, log.header)
    for entry in select(logs, Filters(ticks=True)):
        if {step_of(part) for part in (entry.event, *entry.commands)} & {1}:
            continue
        if entry.kind not in {"PutsOpened", "LayersWritten", "PutsClosed"}:
            writer.record(entry.seq, entry.cause, entry.raw.event, entry.raw.commands)  # type: ignore[arg-type]
    writer.close()
    return open_logs([directory])


def test_what_the_store_held_before_is_stored_first(
    recording: LogSet, short: Path, tmp_path: Path
) -> None:
    played = play(without_the_save(recording, tmp_path), short)
    assert played.num_seeded == 2
    # The first lookup comes before the save that is not in the log: it finds the objects now.
    assert played.tally.differences == [
        "lookup 1 of e#0: recorded 0 blocks (not-stored); now 2 blocks"
    ]
    assert played.tally.faults == []
    assert (played.tally.num_checked, played.num_audited) == (6, 2)


class Ends:
    """How the daemons of a run were ended, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, bool]] = []
        real = Stage.end

        def end(stage: Stage, label: str, *, killed: bool = False) -> None:
            if stage.daemons[label].pid:
                self.found.append((label, killed))
            real(stage, label, killed=killed)

        monkeypatch.setattr(Stage, "end", end)


@pytest.mark.parametrize(
    ("name", "num_same"),
    [("daemon-killed", 9), ("daemon-killed-in-load", 11), ("engine-killed", 6)],
)
def test_who_died_in_the_recording_dies_again_and_what_it_had_answered_is_awaited(
    name: str, num_same: int, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(monkeypatch)
    logs = open_logs([HISTORIES / name])
    played = play(logs, short)
    assert (played.tally.differences, played.tally.faults) == ([], [])
    assert played.tally.num_same == num_same
    assert all(killed for _, killed in ends.found)
    assert len(ends.found) == name.startswith("daemon")


def test_without_the_log_of_who_saw_it_nobody_is_known_to_have_died(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(monkeypatch)
    logs = open_logs([HISTORIES / "daemon-killed"])
    daemons = LogSet([log for log in logs.logs if log.header.core == "kvworker"], [])
    played = play(daemons, short)
    assert (played.tally.differences, played.tally.num_same) == ([], 9)
    assert [killed for _, killed in ends.found] == [False]


def test_a_job_that_now_ends_later_does_not_hold_up_what_it_waits_for(
    recording: LogSet, short: Path, tmp_path: Path
) -> None:
    """As if the save had been skipped at once: now it ends only behind the verdict."""
    (log,) = recording.logs
    writer = LogWriter(tmp_path, log.header)
    ended = {entry.stimulus: entry for entry in select(recording, Filters(kind="JobsEnded"))}
    (end, *_) = (one for entry in ended.values() for one in entry.commands if "Jobs" in str(one))
    for entry in select(recording, Filters(ticks=True)):
        commands = [one for one in entry.commands if one != end]
        commands += [end] if entry.kind == "PutsOpened" else []
        writer.record(entry.seq, entry.cause, entry.raw.event, commands)  # type: ignore[arg-type]
    writer.close()
    played = play(open_logs([tmp_path]), short)
    assert (played.tally.differences, played.tally.faults) == ([], [])
    assert played.tally.num_same == 8


def test_at_recorded_pace_a_run_takes_as_long(recording: LogSet, short: Path) -> None:
    slow = play(recording, short, speed=0.05)
    assert slow.tally.differences == []
    assert slow.seconds >= slow.recorded_seconds / 0.05


def test_until_stops_early(recording: LogSet, short: Path) -> None:
    played = play(recording, short, until_ns=0)
    assert played.num_said == 0
    assert played.tally.expected == {}


def test_only_one_request(recording: LogSet, short: Path) -> None:
    played = play(recording, short, only="load-3")
    kinds = [item.kind for item in played.tally.expected]
    assert sorted(kinds) == ["job", "plan"]
    # What it loads was saved by another request, which is not played: so it is stored beforehand.
    assert played.num_seeded == 2
    assert played.tally.differences == []


def test_a_daemon_that_does_not_answer_is_named_and_the_run_ends(
    recording: LogSet, short: Path
) -> None:
    program = (sys.executable, str(BROKEN), "lookups-hang")
    played = play(recording, short, program=program, answer_s=0.3)
    assert any("lookup 1 of e#0 has no answer" in one for one in played.tally.faults)
    assert "lookup 1 of e#0: recorded 0 blocks (not-stored); now no answer" in (
        played.tally.differences
    )


def test_the_whole_run_is_bounded(recording: LogSet, short: Path) -> None:
    with pytest.raises(DriveError, match="longer than"):
        play(recording, short, limit_s=0.0)


def test_a_daemon_that_does_not_start_is_said_with_its_words(
    recording: LogSet, short: Path
) -> None:
    program = (sys.executable, "-c", "import sys; sys.exit('no such thing')")
    with pytest.raises(DriveError, match="no such thing"):
        play(recording, short, program=program)


def test_a_scheduler_sides_log_alone_cannot_be_played(short: Path) -> None:
    with pytest.raises(DriveError, match="no log of a daemon"):
        Driver([], Options(directory=short))


def test_nothing_is_left_running(recording: LogSet, short: Path) -> None:
    play(recording, short)
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(short) not in found.stdout
