"""At most so often per subject, in bounded memory."""

from kvworker.limits import _MAX_SUBJECTS, RateLimit


def test_once_per_interval_and_subject() -> None:
    limit = RateLimit(100)
    assert limit.allows(b"a", 0)
    assert not limit.allows(b"a", 99)
    assert limit.allows(b"b", 99)
    assert limit.allows(b"a", 100)
    assert not limit.allows(b"a", 150)


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    limit = RateLimit(10**9)
    limit.allows(b"first", 0)
    for number in range(_MAX_SUBJECTS):
        assert limit.allows(b"%d" % number, 1)
    assert len(limit._last_ns) == _MAX_SUBJECTS
    assert limit.allows(b"first", 2)
