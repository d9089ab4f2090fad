from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.ledger import BatchAssigner, Ledger

HISTORIES = st.lists(st.sets(st.integers(0, 4), min_size=1), max_size=20)


def step(dealer: BatchAssigner, ledger: Ledger, who: set[int]) -> Ledger:
    """The ledger after a step to which ``who`` contribute."""
    return ledger.advance([dealer.assign(ledger, r) for r in sorted(who)], tuple(sorted(who)))


def test_each_replica_has_a_shard_of_its_own() -> None:
    dealer = BatchAssigner("per_replica", 3)
    ledger = step(dealer, step(dealer, dealer.begin(), {0, 1, 2}), {0, 2})
    assert ledger.cursors == (2, 1, 2)
    assert [dealer.assign(ledger, r) for r in range(3)] == [(0, 2), (1, 1), (2, 2)]
    resumed = Ledger((4, 2), ((0, 1),))
    assert BatchAssigner("per_replica", 2).assign(resumed, 0) == (0, 1)


def test_all_take_from_one_sequence_and_what_is_left_comes_first() -> None:
    dealer = BatchAssigner("global", 4)
    ledger = step(dealer, dealer.begin(), {0, 1, 2, 3})
    assert (ledger.cursors, ledger.holes) == ((4,), ())
    ledger = step(dealer, ledger, {0, 2, 3})  # 1 is lost with batch 5
    assert ledger.holes == ((0, 5),)
    assert [dealer.assign(ledger, r) for r in (0, 2, 3)] == [(0, 5), (0, 8), (0, 9)]
    assert dealer.assign(ledger, 1) == (0, 10)  # if it is back so soon, after the others
    assert step(dealer, ledger, {0, 2, 3}) == Ledger((10,), (), (0, 2, 3))


def test_the_order_of_the_hands() -> None:
    dealer = BatchAssigner("global", 5)
    ledger = Ledger((20,), (), (1, 4))
    assert [dealer.assign(ledger, r)[1] - 20 for r in (1, 4, 0, 2, 3)] == [0, 1, 2, 3, 4]


@given(HISTORIES)
def test_no_two_replicas_hold_one_batch_and_nothing_is_left_out_for_long(steps: list[set[int]]) -> None:
    for assignment in ("per_replica", "global"):
        dealer = BatchAssigner(assignment, 5)
        ledger = dealer.begin()
        for who in steps:
            hands = [dealer.assign(ledger, r) for r in range(5)]
            assert len(set(hands)) == 5
            before, ledger = ledger, step(dealer, ledger, who)
            assert len(ledger.holes) <= (4 if assignment == "global" else 0)
            if set(before.takers) == who and len(before.holes) <= len(who):
                assert ledger.holes == ()


@given(HISTORIES)
def test_the_next_batch_is_foreseen_while_the_contributors_stay_the_same(steps: list[set[int]]) -> None:
    for assignment in ("per_replica", "global"):
        dealer = BatchAssigner(assignment, 5)
        ledger = dealer.begin()
        for who in steps:
            guesses = {r: dealer.predict(ledger, r) for r in who}
            right = assignment == "per_replica" or who == set(ledger.takers or range(5))
            ledger = step(dealer, ledger, who)
            if right:
                assert guesses == {r: dealer.assign(ledger, r) for r in who}
