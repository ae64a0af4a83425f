"""What a recording takes for granted."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcommon import messages as msg
from kvcommon.keys import fingerprint
from kvreplay.drive.needs import find_needs, renamed
from kvreplay.drive.rank import save_job
from kvreplay.loading import Entry, LogSet
from kvreplay.merge import merge
from kvworker.core import commands as do
from kvworker.core import events as work
from kvworker.outcome import Outcome
from tests.kvreplay.pair import Pair, namespace


def daemons(logs: LogSet) -> LogSet:
    return LogSet([log for log in logs.logs if log.header.core == "kvworker"], [])


def test_what_was_there_before_is_needed_and_what_was_saved_is_not(tmp_path: Path) -> None:
    pair = Pair(tmp_path, ranks=2)
    pair.put("old", 6)
    pair.serve("a", 100, "old", step=1)
    pair.serve("b", 100, "new", step=3, first_block=10)
    pair.serve("c", 100, "new", step=5, first_block=20)
    needs = find_needs(merge(daemons(pair.close()).logs))
    assert len(needs.keys) == 12
    for rank in range(2):
        mark = fingerprint(namespace(rank))
        assert len(needs.of(mark)) == 6
        assert needs.logs[mark] == f"kvworker-cpu-{rank}"
        assert needs.attaches[mark].namespace == namespace(rank)


def test_synthetic_bytes_get_a_namespace_of_their_own() -> None:
    ours = renamed(namespace(0), "x1")
    assert ours.label == "kvreplay-x1"
    assert fingerprint(ours) != fingerprint(namespace(0))
    assert fingerprint(renamed(namespace(0), "x2")) != fingerprint(ours)


def record(event: Any, *commands: Any) -> Entry:
    raw: Any = None
    return Entry("w", "kvworker", 1, "", 0, event, commands, "", "", raw)


def key(name: bytes) -> str:
    return f"kvf1-mark-0-{name.hex()}"


def told(body: Any) -> work.SchedulerSaid:
    return work.SchedulerSaid(now_ns=1, engine="e#0", epoch=1, body=body)


def saved(request: str, block: bytes, op: int, *, whole: bool) -> list[Entry]:
    """A request saves one block, with a session or without."""
    job = save_job(op, 0, [(1, block)])
    plan = msg.StepPlan(step=op, saves=(msgspec.structs.replace(job, request_id=request),))
    where: dict[str, Any] = {"engine": "e#0", "step": op, "keys": (key(block),)}
    ok = (Outcome.OK,)
    opens = record(told(plan), do.OpenPuts(op=op, group=0, **where))
    opened = work.PutsOpened(now_ns=1, op=op, outcomes=ok, whole=whole)
    writes = do.WriteLayers(
        op=op + 1, group=0, block_ids=(1,), first_layer=0, end_layer=1, whole=whole, **where
    )
    written = work.LayersWritten(now_ns=1, op=op + 1, outcomes=ok, num_bytes=(8,))
    if whole:
        return [opens, record(opened, writes), record(written)]
    closes = do.ClosePuts(op=op + 2, engine="e#0", step=op, end=(key(block),))
    closed = work.PutsClosed(now_ns=1, op=op + 2, ended=ok)
    return [opens, record(opened, writes), record(written, closes), record(closed)]


def found(request: str, block: bytes, op: int) -> list[Entry]:
    """A request looks for one block, which is stored."""
    group = msg.LookupGroup(group=0, block_hashes=(block,))
    lookup = msg.Lookup(lookup_id=op, request_id=request, groups=(group,))
    looks = do.FindKeys(op=op, engine="e#0", keys=(key(block),))
    return [
        record(told(lookup), looks),
        record(work.KeysFound(now_ns=1, op=op, outcomes=(Outcome.OK,))),
    ]


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_saved_with_a_session_or_whole_is_not_needed(whole: bool) -> None:
    entries = [*saved("a", b"x", 10, whole=whole), *found("b", b"x", 20), *found("b", b"y", 30)]
    assert list(find_needs(entries).keys) == [key(b"y")]


def test_a_key_that_was_opened_for_writing_was_not_there_whatever_became_of_its_writer() -> None:
    """A writer that is killed leaves its key open: others find that it exists."""
    entries = [*saved("a", b"x", 10, whole=False)[:2], *saved("b", b"y", 20, whole=False)[:1]]
    again = saved("c", b"x", 30, whole=False)[:1]
    exists = record(work.PutsOpened(now_ns=1, op=30, outcomes=(Outcome.EXISTS,)))
    never = record(work.PutsOpened(now_ns=1, op=20, outcomes=(Outcome.EXISTS,)))
    assert list(find_needs([*entries, *again, exists, never]).keys) == [key(b"y")]


def test_one_request_alone_needs_what_others_have_saved_and_it_finds() -> None:
    entries = [
        *saved("a", b"x", 10, whole=False),
        *saved("b", b"y", 20, whole=False),
        *found("b", b"x", 30),
        *found("b", b"y", 40),
        *found("c", b"z", 50),
    ]
    assert list(find_needs(entries).keys) == [key(b"z")]
    assert list(find_needs(entries, "b").keys) == [key(b"x")]
    assert list(find_needs(entries, "c").keys) == [key(b"z")]
