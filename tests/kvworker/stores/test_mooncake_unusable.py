from kvworker.stores.mooncake_unusable import FORGET_LEASES, Unusable

LEASE = 1000


def test_it_is_removed_once_the_lease_is_over_and_then_forgotten() -> None:
    unusable = Unusable(LEASE)
    unusable.add("a", 0)
    unusable.add("b", 500)
    assert "a" in unusable
    assert unusable.due(LEASE) == []
    assert unusable.due(LEASE + 1) == ["a"]
    assert unusable.due(LEASE + 501) == ["a", "b"]
    unusable.discard("a")
    unusable.discard("never seen")
    assert "a" not in unusable
    assert unusable.due(LEASE + 501) == ["b"]


def test_one_that_was_opened_again_is_leased_anew() -> None:
    unusable = Unusable(LEASE)
    unusable.add("a", 0)
    unusable.add("a", 900)
    assert unusable.due(LEASE + 1) == []
    assert len(unusable) == 1


def test_one_that_others_keep_is_forgotten() -> None:
    unusable = Unusable(LEASE)
    unusable.add("a", 0)
    assert unusable.due(FORGET_LEASES * LEASE) == ["a"]
    assert unusable.due(FORGET_LEASES * LEASE + 1) == []
    assert "a" not in unusable


def test_the_oldest_makes_room() -> None:
    unusable = Unusable(LEASE, limit=2)
    for key in "abc":
        unusable.add(key, 0)
    assert ["a" in unusable, "b" in unusable, "c" in unusable] == [False, True, True]
