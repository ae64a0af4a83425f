from kvcommon.reasons import DAEMON_LOST, DAEMON_NOT_ATTACHED, STORE_DOWN
from kvsched.core.ranks import Ranks


def serves(ranks: Ranks) -> bool:
    return ranks.serving


def serving(count: int = 2) -> Ranks:
    ranks = Ranks()
    ranks.named = tuple(range(count))
    for rank in ranks.all():
        rank.epoch, rank.attached, rank.lost = 7, True, False
    return ranks


def test_nothing_is_served_before_ranks_are_named() -> None:
    ranks = Ranks()
    ranks.get(0).attached = True
    assert not serves(ranks)
    assert ranks.obstacle() == DAEMON_NOT_ATTACHED


def test_every_rank_is_needed() -> None:
    ranks = serving()
    assert serves(ranks)
    assert ranks.obstacle() == ""
    ranks.get(1).attached = False
    assert not serves(ranks)
    assert ranks.obstacle() == DAEMON_NOT_ATTACHED
    ranks.get(0).lost = True
    assert ranks.obstacle() == DAEMON_LOST


def test_one_store_that_is_down_is_enough() -> None:
    ranks = serving()
    ranks.get(1).store_up = False
    assert not ranks.store_up
    assert ranks.obstacle() == STORE_DOWN


def test_ranks_are_in_order_whatever_spoke_first() -> None:
    ranks = Ranks()
    ranks.get(3)
    ranks.get(1)
    ranks.named = (1, 3)
    assert [rank.rank for rank in ranks.all()] == [1, 3]
    assert ranks.lookup_rank == 1


def test_a_late_acknowledgement_is_found_once_and_forgiven() -> None:
    ranks = serving()
    ranks.sent_plan(0, 1, 100)
    ranks.sent_plan(0, 2, 200)
    assert ranks.find_late(100) == 0
    assert ranks.find_late(101) == 1
    assert ranks.find_late(101) == 0
    assert not serves(ranks)
    ranks.acked(0, 1, 101)
    assert serves(ranks)
    ranks.acked(0, 2, 999)
    assert ranks.find_late(9999) == 0


def test_a_lost_rank_owes_nothing() -> None:
    ranks = serving()
    ranks.sent_plan(0, 1, 100)
    ranks.get(0).lost = True
    assert ranks.find_late(999) == 0
