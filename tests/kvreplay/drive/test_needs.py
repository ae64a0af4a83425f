"""What a recording takes for granted."""

from pathlib import Path

from kvcommon.keys import fingerprint
from kvreplay.drive.needs import find_needs, renamed
from kvreplay.loading import LogSet
from kvreplay.merge import merge
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
