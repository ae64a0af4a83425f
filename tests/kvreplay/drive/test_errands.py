"""What a run leaves behind in a Mooncake that is not its own: nothing, and what was there stays."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcommon.keys import fingerprint
from kvreplay.drive.driver import Driver
from kvreplay.drive.errors import DriveError
from kvreplay.drive.needs import renamed
from kvreplay.drive.stage import Options, Played, Stage
from kvreplay.loading import LogSet
from kvworker.stores.mooncake_connect import load_library
from localmaster import LocalMaster
from tests.e2e.stack import mooncake_file
from tests.kvreplay.drive.recording import record

LEASE_MS = 300
#: An object of somebody else, with a key like ours.
FOREIGN = "kvf1-" + "0" * 24 + "-0-" + "ab" * 32


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> LogSet:
    return record(tmp_path_factory.mktemp("recording"))


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvr") as name:
        yield Path(name)


@pytest.fixture
def master() -> Iterator[LocalMaster]:
    with LocalMaster(f"--default_kv_lease_ttl={LEASE_MS}") as running:
        yield running


@pytest.fixture
def other(master: LocalMaster) -> Iterator[Any]:
    """Somebody else's client, with the only segment there is, so that nothing goes with daemons."""
    client = load_library().MooncakeDistributedStore()
    size = 64 << 20
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", size, size, "tcp", "", master.address) == 0
    assert client.put(FOREIGN, b"theirs") == 0
    yield client
    client.close()


def play(logs: LogSet, short: Path, master: LocalMaster, **options: Any) -> Played:
    path = mooncake_file(short, master.address, "0")
    plain = {**json.loads(path.read_text()), "store_lease_ms": LEASE_MS}
    path.write_text(json.dumps(plain))
    store = ("--store", "mooncake", "--mooncake-config", str(path))
    chosen = {"store": store, "lease_s": LEASE_MS / 1000, "limit_s": 60.0, **options}
    return Driver(logs.logs, Options(directory=short, **chosen)).play()


def test_its_objects_are_removed_and_nobody_elses(
    recording: LogSet, short: Path, master: LocalMaster, other: Any
) -> None:
    played = play(recording, short, master)
    assert (played.tally.differences, played.tally.faults) == ([], [])
    assert len(played.tally.keys) == 2
    assert played.num_removed == 2
    assert [other.is_exist(key) for key in played.tally.keys] == [0, 0]
    assert other.is_exist(FOREIGN) == 1


def test_what_is_still_leased_is_said(
    recording: LogSet, short: Path, master: LocalMaster, other: Any
) -> None:
    """Without the time to wait for the end of the leases that the run has taken itself."""
    played = play(recording, short, master, lease_s=100.0)
    (key, _) = sorted(played.tally.keys)
    namespace = "-".join(key.split("-")[:2])
    assert played.num_removed == 0
    assert other.is_exist(key) == 1
    (note,) = played.notes
    assert note.startswith(f"up to 2 objects of this run are left in the store (keys {namespace})")
    assert "leased for up to 100 s" in note


def test_a_run_that_fails_removes_what_it_can(
    recording: LogSet,
    short: Path,
    master: LocalMaster,
    other: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here right behind the save: nothing has been read, so nothing is leased."""
    stages: list[Stage] = []

    def listen(stage: Stage, timeout_s: float) -> None:
        real(stage, timeout_s)
        if stage.tally.keys and not stages:
            stages.append(stage)
            raise DriveError("planted")

    real = Stage.listen
    monkeypatch.setattr(Stage, "listen", listen)
    with pytest.raises(DriveError, match="planted"):
        play(recording, short, master)
    (stage,) = stages
    assert stage.played.num_removed == 2
    assert [other.is_exist(key) for key in stage.tally.keys] == [0, 0]


def test_nothing_is_removed_from_a_store_that_ends_with_its_daemon(
    recording: LogSet, short: Path
) -> None:
    played = Driver(recording.logs, Options(directory=short, limit_s=60.0)).play()
    assert (len(played.tally.keys), played.num_removed, played.notes) == (2, 0, [])


def test_keys_of_a_run_are_those_of_its_own_namespace(recording: LogSet, short: Path) -> None:
    """Whatever is removed begins with a fingerprint that no engine has."""
    played = Driver(recording.logs, Options(directory=short, limit_s=60.0)).play()
    attaches = {
        entry.event.body.namespace  # type: ignore[union-attr]
        for log in recording.logs
        for entry in log
        if type(getattr(entry.event, "body", None)).__name__ == "Attach"
    }
    theirs = {fingerprint(one) for one in attaches}
    assert not {key.split("-")[1] for key in played.tally.keys} & theirs
    assert fingerprint(renamed(next(iter(attaches)), "x")) not in theirs
