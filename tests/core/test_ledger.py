from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.ledger import MAX_HOLES, BatchAssigner, Ledger


def trained(ledger: Ledger) -> set[tuple[int, int]]:
    """The batches (data shard, index) inside a state."""
    below = {(s, i) for s, cursor in enumerate(ledger.cursors) for i in range(cursor)}
    return below - set(ledger.holes)


def numbers(ledger: Ledger) -> set[int]:
    """The same, as places in the whole data."""
    return {index * len(ledger.cursors) + shard for shard, index in trained(ledger)}


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Any ledger that training leads to."""
    shards = draw(st.integers(1, 5))
    done = draw(st.sets(st.tuples(st.integers(0, shards - 1), st.integers(0, 12)), max_size=40))
    return Ledger.empty(shards).advance(sorted(done), (0, 2))


def test_only_contributors_move_on() -> None:
    assert Ledger((4, 4, 3)).advance([(0, 4), (2, 3)]) == Ledger((5, 4, 4))
    assert Ledger.empty(3).advance([]) == Ledger((0, 0, 0))


def test_what_is_jumped_over_is_a_hole_until_it_is_trained() -> None:
    ledger = Ledger((4,)).advance([(0, 4), (0, 7)], (0, 3))
    assert ledger == Ledger((8,), ((0, 5), (0, 6)), (0, 3))
    assert [ledger.untrained(0, place) for place in range(4)] == [5, 6, 8, 9]
    assert ledger.advance([(0, 6), (0, 8)]) == Ledger((9,), ((0, 5),))


@pytest.mark.parametrize("index", [0, 3])
def test_a_batch_that_was_trained_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=rf"batch {index} of data shard 1 was trained before"):
        Ledger((9, 4), ((1, 2),)).advance([(1, index)])


def test_a_batch_counts_once_even_within_a_step() -> None:
    for ledger in (Ledger((0, 0)), Ledger((3, 0), ((0, 0),))):
        with pytest.raises(ValueError, match="batch 0 of data shard 0 was trained before"):
            ledger.advance([(0, 0), (0, 0)])


def test_holes_are_bounded() -> None:
    assert len(Ledger.empty(1).advance([(0, MAX_HOLES)]).holes) == MAX_HOLES
    for far in (MAX_HOLES + 1, 2**63):
        with pytest.raises(ValueError, match="too far beyond the next one, 0"):
            Ledger.empty(2).advance([(1, far)])
    with pytest.raises(ValueError, match=f"{MAX_HOLES + 1} batches were left out; at most {MAX_HOLES} are"):
        Ledger((0, MAX_HOLES + 1)).resharded(3)


@pytest.mark.parametrize(
    ("cursors", "holes", "why"),
    [
        ((2, -1), (), "none may be negative"),
        ((3,), ((0, 1), (0, 0)), "not sorted"),
        ((3,), ((0, 1), (0, 1)), "stands there twice"),
        ((3,), ((0, 2),), "hole 2 of data shard 0 is not below its last trained batch"),
        ((3,), ((1, 0),), "hole 0 of data shard 1 is not below"),
        ((3,), ((0, -1),), "hole -1"),
    ],
)
def test_what_training_cannot_lead_to_is_refused(
    cursors: tuple[int, ...], holes: tuple[tuple[int, int], ...], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        Ledger(cursors, holes)


@given(st.lists(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=5), max_size=12))
def test_every_batch_at_most_once_in_any_order(steps: list[set[tuple[int, int]]]) -> None:
    ledger, done = Ledger.empty(3), set[tuple[int, int]]()
    for batches in steps:
        if batches & done:
            with pytest.raises(ValueError, match="was trained before"):
                ledger.advance(batches)
            continue
        ledger = ledger.advance(batches)
        assert ledger == ledger.advance([])
        done |= batches
        assert trained(ledger) == done
        for shard in range(3):
            places = [ledger.untrained(shard, place) for place in range(15)]
            left = (i for i in itertools.count() if (shard, i) not in done)
            assert places == list(itertools.islice(left, 15))


@given(ledgers(), st.integers(1, 6))
def test_on_other_replicas_the_same_batches_are_trained(ledger: Ledger, shards: int) -> None:
    other = ledger.resharded(shards)
    assert len(other.cursors) == shards
    assert numbers(other) == numbers(ledger)
    assert other.takers == ()
    assert other.resharded(len(ledger.cursors)) == ledger.resharded(len(ledger.cursors))


def test_a_shard_that_is_far_behind_becomes_holes() -> None:
    assert Ledger((3, 0, 3)).resharded(1) == Ledger((9,), ((0, 1), (0, 4), (0, 7)))
    assert Ledger((9,), ((0, 1), (0, 4), (0, 7))).resharded(3) == Ledger((3, 0, 3))
    assert Ledger.empty(4).resharded(2) == Ledger.empty(2)


def test_a_batch_that_is_left_out_often_enough_is_given_up() -> None:
    """It is spent then, like those that were trained, so that no replica brings it again."""
    ledger = Ledger((4, 4))
    for step in range(2):
        ledger = ledger.advance([(0, 4 + step)], (0,), [(1, 4)], 3)
        assert ledger.spoilt == ((1, 4, step + 1),)
        assert ledger.untrained(1, 0) == 4, "it is tried again"
    assert ledger.given_up([(1, 4)], 3) == ((1, 4),)
    ledger = ledger.advance([(0, 6)], (0,), [(1, 4)], 3)
    assert ledger == Ledger((7, 5), (), (0,))
    assert ledger.untrained(1, 0) == 5


def test_a_batch_that_becomes_finite_is_trained_and_forgotten() -> None:
    ledger = Ledger((1, 0)).advance([(0, 1)], (0,), [(1, 0)], 3)
    assert ledger.advance([(0, 2), (1, 0)], (0, 1)) == Ledger((3, 1), (), (0, 1))


def test_a_hole_can_be_given_up() -> None:
    ledger = Ledger((6,), ((0, 3),), (0, 1), ((0, 3, 1),))
    assert ledger.advance([(0, 6)], (1,), [(0, 3)], 2) == Ledger((7,), (), (1,))


@pytest.mark.parametrize(
    "spoilt", [((0, 1, 0),), ((3, 1, 1),), ((0, -1, 1),), ((0, 2, 1), (0, 1, 1)), ((0, 1, 1),) * 2]
)
def test_what_was_left_out_is_checked(spoilt: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"left out|sorted"):
        Ledger((1,), (), (), spoilt)


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
