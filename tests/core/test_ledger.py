import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.ledger import MAX_HOLES, Ledger, Run, overlaps

Unit = tuple[int, int]  # (data shard, number)


def units(runs: list[Run] | tuple[Run, ...]) -> list[Unit]:
    return [(shard, n) for shard, first, count in runs for n in range(first, first + count)]


def trained(ledger: Ledger) -> set[Unit]:
    below = {(s, n) for s, cursor in enumerate(ledger.cursors) for n in range(cursor)}
    return below - set(units(ledger.holes))


run = st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 5))
runs = st.lists(run, max_size=4)


def test_what_is_jumped_over_is_a_hole_until_it_is_trained() -> None:
    ledger = Ledger((4,)).advance([(0, 4, 1), (0, 7, 2)])
    assert ledger == Ledger((9,), ((0, 5, 2),))
    assert ledger.at(0, [(0, 5)]) == ((0, 5, 2), (0, 9, 3))
    assert ledger.at(0, [(3, 1), (0, 1)]) == ((0, 10, 1), (0, 5, 1))
    assert ledger.advance([(0, 6, 1), (0, 9, 3)]) == Ledger((12,), ((0, 5, 1),))
    assert ledger.advance([(0, 5, 2)]) == Ledger((9,))


@pytest.mark.parametrize("bad", [(1, 0, 1), (1, 3, 1), (1, 2, 2), (1, 3, 4), (1, 1, 2)])
def test_a_unit_that_was_trained_is_refused(bad: Run) -> None:
    with pytest.raises(ValueError, match=r"a unit of \d+ to \d+ of data shard 1 was trained before"):
        Ledger((9, 4), ((1, 2, 1),)).advance([bad])


@pytest.mark.parametrize("bad", [(0, 5, 0), (0, -1, 2), (0, 2**62, 1), (1, 0, 1), (-1, 0, 1)])
def test_a_run_that_cannot_be_is_refused(bad: Run) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        Ledger.empty(1).advance([bad])


def test_holes_are_bounded() -> None:
    full = Ledger((2 * MAX_HOLES + 1,), tuple((0, 2 * n, 1) for n in range(MAX_HOLES)))
    assert len(full.advance([(0, 2 * MAX_HOLES + 1, 1)]).holes) == MAX_HOLES
    with pytest.raises(ValueError, match=f"{MAX_HOLES + 1} runs of units were left out; at most {MAX_HOLES} are"):
        full.advance([(0, 2 * MAX_HOLES + 2, 1)])
    with pytest.raises(ValueError, match=f"{MAX_HOLES + 1} batches were left out; at most {MAX_HOLES} are"):
        Ledger((0, 2 * (MAX_HOLES + 1))).resharded(3, 2)


@pytest.mark.parametrize(
    ("cursors", "holes", "why"),
    [
        ((2, -1), (), "each must be from 0"),
        ((3,), ((0, 1, 1), (0, 0, 1)), "not sorted"),
        ((9,), ((0, 1, 3), (0, 2, 1)), "overlap"),
        ((9,), ((0, 1, 2), (0, 3, 1)), "touch each other"),
        ((3,), ((0, 2, 1),), "hole at 2 of data shard 0 is not below its last trained unit"),
        ((3,), ((0, 1, 1), (1, 0, 1)), "of data shard 1 cannot be"),
        ((3,), ((0, -1, 1),), "from -1 of data shard 0 cannot be"),
        ((3,), ((0, 0, 0),), "0 units from 0"),
    ],
)
def test_what_training_cannot_lead_to_is_refused(cursors, holes, why) -> None:
    with pytest.raises(ValueError, match=why):
        Ledger(cursors, holes)


@given(st.lists(st.tuples(runs, runs), max_size=10), st.integers(1, 3))
def test_every_unit_at_most_once_in_any_order(steps: list[tuple[list[Run], list[Run]]], retries: int) -> None:
    """Against sets of single units, with units that are left out and given up."""
    ledger, done, times = Ledger.empty(3), set[Unit](), dict[Unit, int]()
    for taken, candidates in steps:
        new = units(taken)
        if len(set(new)) < len(new) or set(new) & done:
            with pytest.raises(ValueError, match="was trained before"):
                ledger.advance(taken)
            continue
        spoiled: list[Run] = []
        for each in candidates:
            if not set(units([each])) & (done | set(new) | set(units(spoiled))):
                spoiled.append(each)
        given_up = {u for u in units(spoiled) if times.get(u, 0) + 1 >= retries}
        assert set(units(ledger.given_up(spoiled, retries))) == given_up
        ledger = ledger.advance(taken, spoiled, retries)
        assert ledger == ledger.advance([])
        done |= set(new) | given_up
        for u in units(spoiled):
            times[u] = times.get(u, 0) + 1
        times = {u: n for u, n in times.items() if u not in done}
        assert trained(ledger) == done
        assert {u: n for *each, n in ledger.spoilt for u in units([(each[0], each[1], each[2])])} == times
        for shard in range(3):
            left = list(itertools.islice((n for n in itertools.count() if (shard, n) not in done), 20))
            found = [n for _, n in units(ledger.at(shard, [(3, 4), (0, 2), (10, 6)]))]
            assert found == left[3:7] + left[:2] + left[10:16]


@given(st.integers(1, 4), st.integers(1, 4), st.lists(run, max_size=8), st.integers(1, 5))
def test_on_other_replicas_the_same_units_are_trained(shards, batch, taken, after) -> None:
    ledger = Ledger.empty(shards)
    for shard, first, count in taken:
        if not set(units([(shard % shards, first, count)])) & trained(ledger):
            ledger = ledger.advance([(shard % shards, first, count)])

    def whole(of: Ledger) -> set[Unit]:
        """The units as (batch of the whole data, place in it)."""
        return {(n // batch * len(of.cursors) + shard, n % batch) for shard, n in trained(of)}

    other = ledger.resharded(after, batch)
    assert len(other.cursors) == after
    assert whole(other) == whole(ledger)
    assert other.resharded(shards, batch) == ledger.resharded(shards, batch)


@pytest.mark.parametrize("ledger", [Ledger((13, 6)), Ledger((12, 6), ((0, 6, 2),)), Ledger((12, 6), ((0, 5, 4),))])
@pytest.mark.parametrize("other", [(1, 3), (2, 3)])
def test_a_batch_that_is_trained_in_part_has_other_units_for_other_ranks(ledger, other) -> None:
    """Even if it has as many: the data is laid out by rank and micro-batch."""
    assert ledger.rescaled((3, 1), (3, 1)) == ledger
    with pytest.raises(ValueError, match="was trained in part"):
        ledger.rescaled((3, 1), other)


def test_a_unit_that_is_left_out_often_enough_is_given_up() -> None:
    """It is spent then, like those that were trained, so that no replica brings it again."""
    ledger = Ledger((4, 4))
    for step in range(2):
        ledger = ledger.advance([(0, 4 + step, 1)], [(1, 4, 2)], 3)
        assert ledger.spoilt == ((1, 4, 2, step + 1),)
        assert ledger.at(1, [(0, 1)]) == ((1, 4, 1),), "it is tried again"
    assert ledger.given_up([(1, 4, 2)], 3) == ((1, 4, 2),)
    assert ledger.given_up([(1, 5, 4)], 3) == ((1, 5, 1),), "each unit is counted by itself"
    ledger = ledger.advance([(0, 6, 1)], [(1, 4, 2)], 3)
    assert ledger == Ledger((7, 6))


@pytest.mark.parametrize(
    "spoilt",
    [((0, 1, 1, 0),), ((3, 1, 1, 1),), ((0, -1, 1, 1),), ((0, 2, 1, 1), (0, 1, 1, 1)), ((0, 1, 1, 1),) * 2],
)
def test_what_was_left_out_is_checked(spoilt: tuple[tuple[int, int, int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"cannot be|sorted"):
        Ledger((1,), (), spoilt)


@given(
    st.integers(1, 4), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9)), unique=True)
)
def test_whole_batches_stay_trained_on_ranks_of_any_number(before, after, batches) -> None:
    ledger = Ledger.empty(2)
    for shard, index in batches:
        ledger = ledger.advance([(shard, index * before, before)])
    other = ledger.rescaled((1, before), (after, 1))
    assert trained(other) == {(s, i * after + n) for s, i in batches for n in range(after)}
    assert other.rescaled((after, 1), (1, before)) == ledger


@given(runs, runs)
def test_runs_overlap_if_they_have_a_unit_in_common(a: list[Run], b: list[Run]) -> None:
    assert overlaps(a, b) is bool(set(units(a)) & set(units(b)))


def test_a_full_ledger_costs_no_seconds() -> None:
    """As many holes as there may be, all of them left out before and now once more."""
    runs = [(0, 4 * n, 2) for n in range(MAX_HOLES)]
    full = Ledger((4 * MAX_HOLES + 1,), tuple(runs), tuple((*run, 1) for run in runs))
    began = time.process_time()
    assert full.given_up(runs, 2) == tuple(runs)
    assert full.advance([(0, 4 * MAX_HOLES + 1, 8)], runs, 3).spoilt == tuple((*run, 2) for run in runs)
    assert full.advance([], runs, 2) == Ledger(full.cursors)
    assert not overlaps([(0, 4 * n + 2, 2) for n in range(MAX_HOLES)], runs)
    assert time.process_time() - began < 10.0  # with each run against each other run it is an hour
    with pytest.raises(ValueError, match=f"{MAX_HOLES + 1} runs of units were left out"):
        Ledger((0,), (), tuple((0, 2 * n, 1, 1) for n in range(MAX_HOLES + 1)))
