from kvworker.stores.base import LocalObject
from kvworker.stores.mooncake_sessions import GetSessions

LEASE = 1000
PLACE = LocalObject(4096, 100)


def _open(sessions: GetSessions, *keys: str, now: int = 0) -> None:
    for key in sessions.acquire(keys, now):
        sessions.opened(key, now)


def test_the_first_user_opens_and_the_last_one_ends() -> None:
    sessions = GetSessions(LEASE)
    assert sessions.acquire(["a", "b", "a"], 0) == ["a", "b"]
    sessions.opened("a", 0)
    sessions.opened("b", 0)
    assert sessions.acquire(["a"], 1) == []
    assert sessions.release(["a", "b"]) == ["b"]
    assert sessions.release(["a"]) == []
    assert sessions.is_held("a")
    assert sessions.release(["a"]) == ["a"]
    assert sessions.keys() == []


def test_releasing_what_nobody_has_changes_nothing() -> None:
    sessions = GetSessions(LEASE)
    _open(sessions, "a")
    assert sessions.release(["b"]) == []
    assert sessions.release(["a", "a"]) == ["a"]


def test_a_session_is_opened_again_at_half_its_lease() -> None:
    sessions = GetSessions(LEASE)
    _open(sessions, "a")
    assert sessions.stale(["a"], 499) == []
    assert sessions.stale(["a", "a"], 500) == ["a"]
    assert sessions.acquire(["a"], 500) == ["a"]
    sessions.opened("a", 500)
    assert sessions.stale(["a"], 999) == []
    assert sessions.stale(["unknown"], 999) == []


def test_the_lease_counts_from_before_the_call() -> None:
    sessions = GetSessions(LEASE)
    sessions.acquire(["a"], 0)
    assert not sessions.is_open("a", 0)
    sessions.opened("a", 0)
    assert sessions.is_open("a", 999)
    assert not sessions.is_open("a", 1000)


def test_an_older_answer_does_not_shorten_a_lease() -> None:
    sessions = GetSessions(LEASE)
    _open(sessions, "a", now=600)
    sessions.opened("a", 100)
    assert sessions.is_open("a", 1599)


def test_where_it_lies_is_asked_once_and_known_while_the_lease_lasts() -> None:
    sessions = GetSessions(LEASE)
    _open(sessions, "a", "b")
    assert sessions.unlooked() == ["a", "b"]
    sessions.place("a", PLACE)
    sessions.place("b", None)
    assert sessions.unlooked() == []
    assert sessions.local("a", 999) == PLACE
    assert sessions.local("b", 0) is None
    assert sessions.local("a", 1000) is None
    sessions.opened("a", 900)
    assert sessions.local("a", 1000) == PLACE, "a renewal does not move the object"


def test_a_lost_session_lies_nowhere_until_it_is_opened_and_asked_again() -> None:
    sessions = GetSessions(LEASE)
    _open(sessions, "a")
    sessions.place("a", PLACE)
    sessions.lost("a")
    assert sessions.local("a", 1) is None
    assert not sessions.is_open("a", 1)
    assert sessions.stale(["a"], 1) == ["a"]
    assert sessions.unlooked() == []
    sessions.place("a", PLACE)
    assert sessions.local("a", 1) is None, "an answer that came too late is dropped"
    sessions.opened("a", 1)
    assert sessions.unlooked() == ["a"]
    assert sessions.local("a", 2) is None


def test_answers_about_ended_sessions_are_dropped() -> None:
    sessions = GetSessions(LEASE)
    sessions.opened("a", 0)
    sessions.lost("a")
    sessions.place("a", PLACE)
    assert sessions.keys() == []
    assert sessions.local("a", 0) is None
