"""Events from other threads reach the owner, in order, and wake its poll."""

import select
import threading

import pytest

from kvworker.core.events import EngineUnmapped, Ticked
from kvworker.inbox import Inbox


def readable(inbox: Inbox) -> bool:
    return bool(select.select([inbox.fileno()], [], [], 0)[0])


def test_readable_exactly_while_something_is_posted() -> None:
    inbox = Inbox()
    assert not readable(inbox)
    assert inbox.take() == []
    inbox.post(Ticked(now_ns=1))
    inbox.post(Ticked(now_ns=2))
    assert readable(inbox)
    assert [event.now_ns for event in inbox.take()] == [1, 2]
    assert not readable(inbox)
    inbox.close()


def test_wake_needs_no_event() -> None:
    inbox = Inbox()
    inbox.wake()
    assert readable(inbox)
    assert inbox.take() == []
    inbox.close()


def test_posts_of_many_threads_all_arrive_each_in_its_order() -> None:
    inbox = Inbox()

    def post(name: str) -> None:
        for op in range(200):
            inbox.post(EngineUnmapped(now_ns=0, op=op, engine=name))

    threads = [threading.Thread(target=post, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[str, list[int]] = {}
    total = 0
    while total < 800:
        assert select.select([inbox.fileno()], [], [], 10)[0]
        for event in inbox.take():
            assert isinstance(event, EngineUnmapped)
            seen.setdefault(event.engine, []).append(event.op)
            total += 1
    for thread in threads:
        thread.join()
    assert all(ops == list(range(200)) for ops in seen.values())
    inbox.close()


def test_posting_after_close_is_harmless() -> None:
    inbox = Inbox()
    inbox.close()
    inbox.close()
    inbox.post(Ticked(now_ns=1))
    with pytest.raises(ValueError, match="negative"):
        select.select([inbox.fileno()], [], [], 0)
