"""The crash matrix of ``docs/failures.md``, as recordings of real runs have it.

``expected.json`` beside each recording only keeps what was said once. Here stands what must be
said, and what must have happened, whenever it is recorded anew.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvcommon import reasons
from kvreplay.loading import LogSet, open_logs
from kvreplay.requests import read_requests
from kvreplay.stats import gather
from kvreplay.verify import CORES, verify
from tests.histories.scenes import REAL, STAGE

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "failures.md"
MISS, HIT, FAILED, LOST, OPEN = "miss", "hit", "failed-load", "lost-load", "open-load"
COMPUTED = "so vLLM has to compute them"


class Row(NamedTuple):
    """What one recording must say."""

    #: Place of the request that is hit by the fault, in order of arrival.
    request: int
    outcome: str
    reason: str
    #: What its sentence must have.
    words: tuple[str, ...]
    #: Counters of the cores, all processes together, that must have grown.
    counters: tuple[str, ...] = ()
    #: What of ``verify`` must be told as ended by a death, and not as open.
    dropped: tuple[str, ...] = ()
    #: Place of a request behind the fault that is a hit again.
    again: int = -1


LOST_DAEMON = ("daemons_lost", "daemon_restarts")
PEERS = ('kvferry_peers_lost_total{role="model"}', 'kvferry_peers_lost_total{role="scheduler"}')
ROWS = {
    "daemon-killed": Row(
        1,
        MISS,
        reasons.DAEMON_LOST,
        ("because the daemon of rank 0 was lost (daemon-lost)",),
        (*LOST_DAEMON, "misses.daemon-lost"),
    ),
    "daemon-killed-in-load": Row(
        1,
        LOST,
        reasons.DAEMON_LOST,
        ("was to take 128 tokens", "rank 0 was lost", "in the middle of the layerwise load of 4"),
        (*LOST_DAEMON, "jobs.layerwise_load.failed"),
        ("LoadLayers", "job 2 on"),
    ),
    "daemon-killed-in-save": Row(
        0,
        MISS,
        reasons.NOT_STORED,
        ("its save of 4 blocks in step", "was dropped, because the daemon of rank 0 was lost"),
        (*LOST_DAEMON, 'kvferry_jobs_ended_total{kind="save",outcome="skipped",reason="exists"}'),
        ("WriteLayers", "job 1 on"),
    ),
    "daemon-restarted": Row(1, MISS, reasons.NOT_STORED, ("not-stored", "saved 2"), LOST_DAEMON),
    "daemon-frozen": Row(
        1,
        MISS,
        reasons.LOOKUP_TIMEOUT,
        ("was not answered before its deadline (lookup-timeout", "the answer came"),
        ("lookup_timeouts", "misses.lookup-timeout"),
    ),
    "daemon-fenced": Row(
        1,
        LOST,
        reasons.DAEMON_LOST,
        ("the silent daemon of rank 0 was killed by the engine in the middle of the layerwise",),
        (*LOST_DAEMON, "daemons_fenced"),
        ("LoadLayers", "job 2 on"),
    ),
    "daemon-may-not-be-killed": Row(
        1,
        FAILED,
        reasons.LATE,
        (
            "was given up after",
            "when rank 0 had not answered in time (late)",
            "the silent daemon of rank 0 could not be killed (it is not surely that process)",
        ),
        ("fences_failed", "daemons_fenced"),
    ),
    "daemon-comes-later": Row(
        0,
        MISS,
        reasons.DAEMON_NOT_ATTACHED,
        ("because the daemon of rank 0 was not attached (daemon-not-attached)",),
        ("misses.daemon-not-attached",),
    ),
    "one-of-two-daemons-killed": Row(
        1,
        MISS,
        reasons.DAEMON_LOST,
        ("because the daemon of rank 1 was lost (daemon-lost)",),
        (*LOST_DAEMON, "misses.daemon-lost"),
    ),
    "engine-killed": Row(0, MISS, reasons.NOT_STORED, ("saved 4 blocks",), PEERS),
    "engine-killed-in-save": Row(
        0,
        MISS,
        reasons.NOT_STORED,
        (
            "its save of 4 blocks in step",
            "was dropped with the engine (engine-lost)",
            "its engine was lost before it had finished",
        ),
        (*PEERS, "kvferry_puts_revoked_total"),
        ("job 1 on", "held for job 1"),
    ),
    "engine-restarted": Row(0, MISS, reasons.NOT_STORED, ("saved 4 blocks",)),
    "engine-frozen": Row(0, MISS, reasons.NOT_STORED, ("saved 4 blocks",), PEERS[:1]),
    "worker-killed": Row(
        1,
        OPEN,
        "",
        (
            "was taking 128 tokens (4 blocks)",
            "when its engine was lost (engine-lost)",
            "#1 was lost (its process ended)",
        ),
        PEERS,
        ("job 2 on", "held for job 2"),
    ),
    "evicted": Row(
        1,
        FAILED,
        reasons.EVICTED,
        ("failed on rank 0 because the store no longer had what", COMPUTED),
        ('kvferry_jobs_ended_total{kind="load",outcome="failed",reason="evicted"}',),
    ),
    "lease-expired": Row(
        1,
        FAILED,
        reasons.EXPIRED,
        ("because the store's lease ran out before the bytes were there", COMPUTED),
        ('kvferry_jobs_ended_total{kind="load",outcome="failed",reason="expired"}',),
    ),
    "layer-fails": Row(
        1,
        FAILED,
        reasons.TRANSFER_FAILED,
        ("4 blocks (5-8) failed on rank 0 because the transfer failed", COMPUTED),
        ('kvferry_jobs_ended_total{kind="load",outcome="failed",reason="transfer-failed"}',),
    ),
    "save-fails": Row(
        0,
        MISS,
        reasons.NOT_STORED,
        ("could not save 4 blocks in step", "(transfer-failed)"),
        ('kvferry_jobs_ended_total{kind="save",outcome="failed",reason="transfer-failed"}',),
    ),
    "store-full": Row(
        0,
        MISS,
        reasons.NOT_STORED,
        ("could not save 2 blocks in step", "(store-full)"),
        ('kvferry_jobs_ended_total{kind="save",outcome="failed",reason="store-full"}',),
    ),
    "lookup-hangs": Row(
        0,
        MISS,
        reasons.LOOKUP_TIMEOUT,
        ("was not answered before its deadline (lookup-timeout", "the answer came"),
        ("lookup_timeouts", "lookups_late"),
    ),
    "load-is-late": Row(
        1,
        FAILED,
        reasons.LATE,
        ("the layerwise load of 4 blocks was given up after", "rank 0 had not answered in time"),
        ("jobs.layerwise_load.cancelled",),
    ),
    "store-down": Row(
        0,
        MISS,
        reasons.STORE_DOWN,
        ("because the store did not answer the lookup (store-down", "could not save 2 blocks"),
        (
            'kvferry_store_changes_total{state="down"}',
            'kvferry_store_changes_total{state="up"}',
            "misses.store-down",
        ),
    ),
    "master-killed": Row(
        1,
        MISS,
        reasons.STORE_DOWN,
        ("because the store did not answer the lookup (store-down",),
        (
            'kvferry_store_changes_total{state="down"}',
            'kvferry_store_changes_total{state="up"}',
            "misses.store-down",
        ),
        again=-2,
    ),
    # What was stored before the master's restart is not stored now; what was saved since is.
    "master-restarted": Row(
        -1,
        MISS,
        reasons.NOT_STORED,
        ("because block 1 of its prefix is not in the store for rank 0 (not-stored; 4",),
        ('kvferry_lookups_total{reason="not-stored"}',),
        again=-2,
    ),
    "master-frozen": Row(
        1,
        MISS,
        reasons.LOOKUP_TIMEOUT,
        ("was not answered before its deadline (lookup-timeout", "the answer came"),
        ("lookup_timeouts",),
    ),
    "aborted": Row(
        1,
        FAILED,
        reasons.CANCELLED,
        ("asynchronous load", "was given up on rank 0 because the request had ended (cancelled)"),
        ('kvferry_jobs_ended_total{kind="load",outcome="cancelled",reason="cancelled"}',),
    ),
    "preempted": Row(2, HIT, reasons.NOT_STORED, ("was preempted", "vLLM had no free blocks")),
}
#: Rows of the tables in ``docs/failures.md``, by how they begin.
RECORDED = {
    "daemon killed": ("daemon-killed", "daemon-killed-in-load", "daemon-killed-in-save"),
    "daemon frozen, nothing open": ("daemon-frozen",),
    "daemon frozen while jobs hold blocks": ("daemon-fenced",),
    "… and it may not be killed": ("daemon-may-not-be-killed",),
    # Nobody can be starved at a chosen moment: tests/chaos looks at what starves by itself.
    "daemon starved by its host": (),
    "engine or model worker killed": ("engine-killed", "engine-killed-in-save", "worker-killed"),
    "engine frozen": ("engine-frozen",),
    # Local sockets lose nothing, so no real run shows it: tests/pair does.
    "messages lost, repeated, reordered": (),
    # Nobody speaks another version: tests/kvsched/test_version_skew.py.
    "another wire version": (),
    "full": ("store-full",),
    "evicted between lookup and load": ("evicted",),
    "lease ends during a load": ("lease-expired",),
    "owner of the memory is dead": ("layer-fails",),
    # It takes a store that breaks its own promise: tests/kvworker/stores.
    "object of the wrong size": (),
    "master restarted with an empty store": ("master-restarted",),
    "a dead writer blocks the key (30 s)": ("daemon-killed-in-save",),
    "call hangs (a frozen master: 30 s)": ("lookup-hangs", "master-frozen"),
    "unreachable, three times in a row": ("store-down", "master-killed"),
}


def recorded(title: str) -> LogSet:
    return open_logs([HERE / "real" / title])


def counters(logs: LogSet) -> Counter[str]:
    """What the cores counted, all processes together."""
    total: Counter[str] = Counter()
    for log in logs.logs:
        core: Any = CORES[log.header.core](log.header.config)
        for entry in log:
            core.handle(entry.event)
        is_daemon = log.header.core == "kvworker"
        total.update(core.status().metrics if is_daemon else core._state.counters)
    return total


def test_every_scene_is_recorded_and_nothing_else() -> None:
    assert {path.name for path in (HERE / "real").iterdir()} == set(REAL)
    assert set(ROWS) <= set(REAL)


def test_every_row_of_the_documentation_has_its_recordings() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", DOCS.read_text("utf-8"), re.MULTILINE)
    named = {row for row in rows if row not in {"what", "---"}}
    begins = {row: [start for start in RECORDED if row.startswith(start)] for row in named}
    assert [row for row, starts in begins.items() if not starts] == []
    assert set(RECORDED) == {start for starts in begins.values() for start in starts}
    assert {title for titles in RECORDED.values() for title in titles} <= set(ROWS)


@pytest.mark.parametrize("title", ROWS)
def test_the_story_names_the_fault(title: str) -> None:
    row = ROWS[title]
    stories = read_requests(recorded(title))
    told = stories[row.request]
    assert (told.facts.outcome, told.facts.reason) == (row.outcome, row.reason), told.sentence
    for words in row.words:
        assert words in told.sentence
    after = stories[row.again]
    assert after.facts.outcome == HIT, after.sentence
    others = [one for one in stories if one.facts.outcome in {FAILED, LOST, OPEN}]
    assert [one.request_id for one in others] in ([], [told.request_id])
    for story in stories:
        assert "no reason" not in story.sentence
        assert "when the logs did" not in story.sentence


@pytest.mark.parametrize(
    ("title", "job"),
    [
        ("daemon-killed-in-load", ("load", "failed", reasons.DAEMON_LOST)),
        ("daemon-killed-in-save", ("save", "failed", reasons.DAEMON_LOST)),
        ("daemon-killed-in-save", ("save", "skipped", reasons.EXISTS)),
        ("daemon-fenced", ("load", "failed", reasons.DAEMON_LOST)),
        ("evicted", ("load", "failed", reasons.EVICTED)),
        ("lease-expired", ("load", "failed", reasons.EXPIRED)),
        ("layer-fails", ("load", "failed", reasons.TRANSFER_FAILED)),
        ("save-fails", ("save", "failed", reasons.TRANSFER_FAILED)),
        ("store-full", ("save", "failed", reasons.STORE_FULL)),
        ("aborted", ("load", "cancelled", reasons.CANCELLED)),
    ],
)
def test_stats_count_it(title: str, job: tuple[str, str, str]) -> None:
    assert gather(recorded(title)).jobs[job] >= 1


@pytest.mark.parametrize("title", ROWS)
def test_the_cores_have_counted_it(title: str) -> None:
    found = counters(recorded(title))
    assert [name for name in ROWS[title].counters if not found[name]] == []


@pytest.mark.parametrize("title", REAL)
def test_verify_finds_nothing_wrong_and_nothing_open_without_a_death(title: str) -> None:
    verdict = verify(recorded(title))
    assert verdict.status == 0
    assert [one.sentence for one in verdict.judgement.open if not one.fate] == []
    if title in ROWS:
        texts = [one.text for one in verdict.judgement.open]
        for words in ROWS[title].dropped:
            assert any(words in text for text in texts), texts


@pytest.mark.parametrize("title", REAL)
def test_no_recording_names_the_machine(title: str) -> None:
    """Paths are those of the stage; what a token or a home directory might be is nowhere."""
    paths: set[str] = set()
    for log in recorded(title).logs:
        raws = [msgspec.msgpack.encode(log.header)]
        for entry in log:
            raws += [bytes(entry.raw.event), bytes(entry.raw.commands)]
        for raw in raws:
            paths |= set(strings(msgspec.msgpack.decode(raw)))
    odd = {text for text in paths if re.search(r"(^|[^\w.])/\w", text)}
    assert {text for text in odd if not text.startswith(str(STAGE))} == set()


def strings(value: object) -> list[str]:
    """Every text in plain data."""
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in strings(one)]
    if isinstance(value, list):
        return [text for one in value for text in strings(one)]
    return [value] if isinstance(value, str) else []


def test_recordings_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (HERE / "real").rglob("*.kvlog")}
    assert max(sizes.values()) < 100_000
    assert sum(sizes.values()) < 1_500_000
