import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.commit import (
    MAX_PARTS,
    MAX_ROWS,
    MAX_WEIGHT,
    AttemptId,
    CommitRecord,
    Contribution,
    Vote,
    VoteTally,
    impossible,
    lr_scale,
    outliers,
    void,
)
from ft_hsdp.core.ledger import MAX_UNIT, Ledger

FENCE = AttemptId(3, 8, 1)
ALL = (Contribution(0, 1, 0, 7, 2.0), Contribution(2, 3, 2, 5, 4.0))
RECORD = CommitRecord(3, 1, 8, "prev", (0, 1, 2), 3, ALL, "digest", 1.5, 0.9, 4096)
STEP: tuple[Any, ...] = ("prev", (0, 1, 2), 3, 3, "linear", 4096)  # what a tally makes its record of
small = st.integers(0, 2)
fences = st.sampled_from([FENCE, FENCE, AttemptId(3, 8, 0)])


def vote(rank: int, fence: AttemptId = FENCE, **changes: object) -> Vote:
    return replace(Vote(rank, fence, f"d{rank}", 9.0, ALL), **changes)  # type: ignore[arg-type]


def made(*votes: Vote, **more: Any) -> CommitRecord:
    tally = VoteTally(FENCE, len(votes), **more)
    for each in votes:
        tally = tally.add(each)
    record = tally.record(*STEP)
    assert record is not None
    return record


@pytest.mark.parametrize(
    "changed",
    [
        {"epoch": 4},
        {"attempt": 2},
        {"step": 9},
        {"prev": "other"},
        {"contributions": ALL[:1]},
        {"contributions": (ALL[0], replace(ALL[1], replica=1))},
        {"contributions": (ALL[0], replace(ALL[1], weight=4))},
        {"contributions": (ALL[0], replace(ALL[1], shard=1))},
        {"contributions": (ALL[0], replace(ALL[1], index=6))},
        {"contributions": (ALL[0], replace(ALL[1], units=2))},
        {"contributions": (ALL[0], replace(ALL[1], part=1))},
        {"digest": "other"},
    ],
)
def test_a_state_is_named_by_everything_that_leads_to_it(changed: dict[str, object]) -> None:
    assert replace(RECORD, **changed).state_id != RECORD.state_id  # type: ignore[arg-type]


def test_a_loss_is_for_the_metrics_only() -> None:
    other = replace(RECORD, contributions=tuple(replace(c, loss=c.loss + 1) for c in ALL))
    assert other.loss == RECORD.loss + 1
    assert other.state_id == RECORD.state_id


def test_what_a_record_adds_up_to() -> None:
    assert RECORD.divisor == 4
    assert RECORD.loss == pytest.approx((1 * 2.0 + 3 * 4.0) / 4)
    assert RECORD.contributors == (0, 2)
    assert RECORD.fence == FENCE
    assert RECORD.ledger(Ledger((7, 9, 5))) == Ledger((8, 9, 6))


def test_whoever_brings_the_batch_of_a_lower_replica_is_named() -> None:
    assert RECORD.doubled == ()
    third = Contribution(1, 1, 2, 5)
    assert replace(RECORD, contributions=(*ALL, third)).doubled == (2,)
    assert replace(RECORD, contributions=(*ALL, third, Contribution(3, 1, 0, 7))).doubled == (2, 3)
    long = (Contribution(1, 9, 2, 0, units=5), Contribution(1, 1, 2, 9), Contribution(2, 2, 2, 8, units=2))
    assert replace(RECORD, contributions=long).doubled == (2,)
    assert replace(RECORD, contributions=(long[0], replace(long[2], index=5))).doubled == ()


def test_a_replica_may_bring_several_runs() -> None:
    runs = (
        Contribution(0, 2, 0, 7, units=2),
        Contribution(0, 1, 0, 12, part=1),
        Contribution(2, 3, 2, 5, units=3),
    )
    record = replace(RECORD, contributions=runs)
    assert (record.contributors, record.units, record.divisor) == ((0, 2), 6, 6)
    assert record.ledger(Ledger((7, 9, 5))) == Ledger((13, 9, 8), ((0, 9, 3),))


@given(st.lists(st.builds(vote, small, fences, digest=st.sampled_from(["a", "b"])), max_size=12))
def test_a_tally_holds_the_first_vote_of_each_rank_about_its_attempt(votes: list[Vote]) -> None:
    tally = VoteTally(FENCE, 3)
    for v in votes:
        tally = tally.add(v)
    first: dict[int, Vote] = {}
    for v in votes:
        if v.fence == FENCE:
            first.setdefault(v.rank, v)
    assert tally.votes == tuple(first[rank] for rank in sorted(first))
    assert tally.complete == (set(first) == {0, 1, 2})


def test_what_a_data_rank_brings_counts_once_however_many_ranks_it_has() -> None:
    other = tuple(replace(c, loss=c.loss + 2) for c in ALL)
    losses = (ALL, ALL, other, other)
    four = (vote(rank, contributions=loss, sumsq=4.0) for rank, loss in enumerate(losses))
    together = made(*four, ranks_per_unit=2)
    apart = made(vote(0, sumsq=8.0), vote(1, contributions=other, sumsq=8.0))
    assert replace(together, digest="") == replace(apart, digest="")


def test_ranks_of_one_data_rank_that_weigh_its_units_differently_are_no_record() -> None:
    heavier = tuple(replace(c, weight=c.weight + 1) for c in ALL)
    tally = VoteTally(FENCE, 2).add(vote(0)).add(vote(1, contributions=heavier))
    assert tally.record(*STEP) is not None
    assert replace(tally, ranks_per_unit=2).record(*STEP) is None


def test_the_record_of_a_tally() -> None:
    losses = tuple(replace(c, loss=c.loss + 2) for c in ALL)
    record = made(vote(1, contributions=losses), vote(0, sumsq=16.0))
    assert (record.epoch, record.step, record.attempt) == (3, 8, 1)
    assert [c.loss for c in record.contributions] == [3.0, 5.0]
    assert record.norm == pytest.approx(math.sqrt(16.0 + 9.0) / 4)
    assert record.lr_scale == pytest.approx(2 / 3)
    assert not record.skipped


def test_the_record_says_who_had_fewer_ranks() -> None:
    tally = VoteTally(FENCE, 2).add(vote(1)).add(vote(0))
    whole, narrow = (tally.record("prev", (0, 1, 2), 3, 3, "none", 4096, widths) for widths in (None, {2: 3}))
    assert whole is not None
    assert narrow is not None
    assert [c.width for c in whole.contributions] == [0, 0]
    assert [(c.replica, c.width) for c in narrow.contributions] == [(0, 0), (2, 3)]
    assert narrow.state_id == whole.state_id, "the sum is what names a state"


@pytest.mark.parametrize("sumsq", [16.0, math.inf, math.nan])
def test_a_poisoned_step_has_a_name_of_its_own_and_a_norm_that_can_be_written_down(sumsq: float) -> None:
    record = made(vote(1, poisoned=(2,)), vote(0, sumsq=sumsq))
    assert (record.poisoned, record.norm, record.skipped) == ((2,), 0.0, True)
    assert record.ledger(Ledger((7, 9, 5))) == Ledger((8, 9, 6))
    assert record.state_id != replace(record, poisoned=()).state_id
    assert replace(record, contributions=(ALL[0], replace(ALL[1], loss=math.nan))).loss == ALL[0].loss


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ((1.0, 99.0), ()),  # of two it is not known who is right
        ((1.0, 1.01, 1.5), ()),  # a deviation counts as a tenth of the median at least
        ((1.0, 1.01, 1.7), (2,)),
        ((1.0, 0.0, 0.9), (1,)),
        ((1.0, 1.4, 1.7, 3.6), ()),  # they differ anyway
        ((1.0, 1.4, 1.7, 3.9), (3,)),
        ((1.0, 1.0, 9.0, 9.0), ()),
        ((1.0, 9.0, 1.0, 9.0, 1.0), (1, 3)),
        ((0.0, 0.0, 1.0), ()),  # no measure of far
    ],
)
def test_a_norm_that_is_far_from_those_of_the_others_is_an_outlier(norms, expected) -> None:
    assert outliers(dict(enumerate(norms)), 6.0) == expected


def test_an_outlier_counts_as_poisoned_in_the_first_attempt() -> None:
    rows = tuple(Contribution(r, 1 + r, r, 5) for r in range(4))
    fence = replace(FENCE, attempt=0)
    squares = tuple((r, (1 + r) ** 2 / 2 * (400 if r == 1 else 1)) for r in range(4))  # of one of two ranks

    def record(at: AttemptId, mads: float | None, poisoned: tuple[int, ...] = (), known: int = 4) -> CommitRecord:
        tally = VoteTally(at, 2)
        for rank in range(2):
            said = squares[:known]
            tally = tally.add(vote(rank, at, contributions=rows, poisoned=poisoned, squares=said))
        found = tally.record("prev", (0, 1, 2, 3), 4, 4, "none", 4096, mads=mads)
        assert found is not None
        return found

    held = record(fence, 6.0)
    assert (held.poisoned, held.outliers, held.norm) == ((1,), (1,), 0.0)
    assert "replicas [1] is far" in held.fault
    both = record(fence, 6.0, (3,))
    assert (both.poisoned, both.outliers) == ((1, 3), (1,))
    assert "[3] is not finite and" in both.fault
    for none in (record(fence, None), record(FENCE, 6.0), record(fence, 6.0, known=0), record(fence, 30.0 * 10)):
        assert (none.poisoned, none.fault) == ((), "")


def test_a_loss_without_weight_does_not_count() -> None:
    """Of a micro-batch without tokens the mean loss is NaN."""
    nothing = tuple(replace(c, weight=0, loss=math.nan) for c in ALL)
    record = made(vote(1, contributions=nothing), vote(0))
    assert [(c.weight, c.loss) for c in record.contributions] == [(1, 2.0), (3, 4.0)]
    assert replace(record, contributions=(ALL[0], nothing[1])).loss == ALL[0].loss
    assert record.updates


def test_a_step_of_which_nothing_counts_is_committed_and_updates_nothing() -> None:
    nothing = tuple(replace(c, weight=0, loss=math.nan) for c in ALL)
    record = made(vote(0, contributions=nothing, sumsq=0.0))
    assert (record.skipped, record.updates, record.norm) == (False, False, 0.0)
    assert [c.loss for c in record.contributions] == [0.0, 0.0], "a NaN is no JSON"
    assert math.isnan(record.loss)
    assert record.lr_scale == pytest.approx(2 / 3), "it depends on units alone"
    assert record.ledger(Ledger((7, 9, 5))) == Ledger((8, 9, 6))


def test_finite_gradients_whose_sum_is_not_are_nobodys_fault() -> None:
    record = made(vote(1), vote(0, sumsq=math.inf))
    assert record.poisoned == record.contributors == (0, 2)


def test_the_digests_of_the_state_count_only_together() -> None:
    one, two = vote(0, state_digest="a"), vote(1, state_digest="b")
    both = VoteTally(FENCE, 2).add(two).add(one).state_digest
    assert both == VoteTally(FENCE, 2).add(one).add(two).state_digest != ""
    assert both != VoteTally(FENCE, 2).add(one).add(replace(two, state_digest="c")).state_digest
    assert VoteTally(FENCE, 2).add(one).add(vote(1)).state_digest == ""


def test_swapped_shards_give_another_state() -> None:
    one, two = (made(vote(0, digest=a), vote(1, digest=b)) for a, b in ("ab", "ba"))
    assert one.state_id != two.state_id


def test_ranks_that_saw_different_contributors_have_no_record() -> None:
    tally = VoteTally(FENCE, 2).add(vote(0)).add(vote(1, contributions=ALL[:1]))
    assert tally.complete
    assert tally.record(*STEP) is None


def test_a_step_without_contributors_has_a_record_to_vote_no_on() -> None:
    record = made(vote(0, contributions=()))
    assert record.contributors == ()
    assert record.lr_scale == 1.0


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (AttemptId(3, 8, 1), True),
        (AttemptId(3, 8, 2), True),  # a later attempt began only after this one had failed
        (AttemptId(3, 8, 0), False),
        (AttemptId(3, 7, 1), False),
        (AttemptId(2, 8, 1), False),
    ],
)
def test_what_makes_an_attempt_void(known: AttemptId, expected: bool) -> None:
    assert void(FENCE, (AttemptId(9, 9, 9), known)) is expected


def test_what_a_step_goes_without_is_in_its_name() -> None:
    """Replicas that disagree on it hold different states, so the token tells them apart."""
    without = replace(RECORD, spoiled=((1, 9, 1),), retries=3)
    assert len({r.state_id for r in (RECORD, without, replace(without, retries=4))}) == 3
    before = Ledger((7, 9, 5), spoilt=((1, 9, 1, 2),))
    assert without.given_up(before) == ((1, 9, 1),)
    assert without.ledger(before) == Ledger((8, 10, 6))


@pytest.mark.parametrize(
    ("contributors", "linear", "sqrt"), [(12, 1.0, 1.0), (11, 0.9167, 0.9574), (9, 0.75, 0.8660)]
)
def test_the_interventions_of_the_paper(contributors: int, linear: float, sqrt: float) -> None:
    assert lr_scale("linear", contributors, 12) == pytest.approx(linear, abs=5e-5)
    assert lr_scale("sqrt", contributors, 12) == pytest.approx(sqrt, abs=5e-5)
    assert lr_scale("none", contributors, 12) == 1.0


@pytest.mark.parametrize(("units", "wanted"), [(0, 12), (-1, 12), (3, 0)])
def test_a_step_without_units_has_no_scale(units: int, wanted: int) -> None:
    with pytest.raises(ValueError, match=f"must be at least 1, got {units} and {wanted}"):
        lr_scale("linear", units, wanted)


def test_more_units_than_wanted_do_not_raise_the_learning_rate() -> None:
    assert lr_scale("linear", 13, 12) == lr_scale("sqrt", 13, 12) == 1.0


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([Contribution(0, 1, 0, 5, units=0)], "0 units from 5; allowed: at least 1"),
        ([Contribution(0, 1, 0, -1)], "1 units from -1; allowed: at least 1, from unit 0"),
        ([Contribution(0, 1, 0, MAX_UNIT)], f"1 units from {MAX_UNIT}; .* to unit {MAX_UNIT - 1}"),
        ([Contribution(0, 1, 0, 2, units=MAX_UNIT)], f"{MAX_UNIT} units from 2"),
        ([Contribution(0, -1, 0, 0)], "a weight of -1 for 1 units"),
        ([Contribution(0, 2 * MAX_WEIGHT + 1, 0, 0, units=2)], f"a weight of {2 * MAX_WEIGHT + 1} for 2 units"),
        ([Contribution(0, 1, 0, 0, part=2)], "part 2 after part 0"),
        ([Contribution(0, 1, 0, 0, part=1), Contribution(0, 1, 0, 1)], "part 0 after part 1"),
        ([Contribution(0, 1, 0, n, part=n) for n in range(MAX_PARTS + 1)], f"below {MAX_PARTS}"),
        ([Contribution(0, 3, 0, 4, units=3), Contribution(0, 3, 0, 2, units=3)], "one unit twice"),
        ([Contribution(0, 1, 0, 4), Contribution(0, 1, 1, 4)], "units of two data shards"),
        ([Contribution(0, 1, 0, 2 * n) for n in range(MAX_ROWS + 1)], f"at most {MAX_ROWS} are allowed"),
    ],
)
def test_contributions_that_no_replica_can_have_made(rows: list[Contribution], why: str) -> None:
    assert re.search(why, impossible(rows))


def test_contributions_that_a_replica_can_have_made() -> None:
    """Runs in any order, in parts, and units without a token."""
    assert not impossible([])
    assert not impossible([Contribution(0, 3, 1, 9, units=3), Contribution(0, 0, 1, 2, units=4, part=1)])
    assert not impossible([Contribution(0, MAX_WEIGHT, 0, MAX_UNIT - 1)])


@pytest.mark.parametrize(
    ("rows", "shared", "why"),
    [
        ([Contribution(0, 1, 0, 4), Contribution(1, 1, 1, 4)], False, ""),
        ([Contribution(0, 1, 0, 4), Contribution(1, 1, 0, 5)], True, ""),
        ([Contribution(0, 1, 0, 4), Contribution(7, 1, 7, 4)], False, r"replicas \[7\] contributed; allowed:"),
        ([Contribution(0, 1, 0, 4), Contribution(0, 1, 0, 4)], False, "replica 0 says one unit twice"),
        ([Contribution(1, 1, 5, 4)], False, "replica 1 says units of data shard 5; allowed: of 1"),
        ([Contribution(1, 1, 1, 4)], True, "replica 1 says units of data shard 1; allowed: of 0"),
        ([Contribution(2, 1, 2, 4, units=0)], False, "replica 2 says 0 units from 4"),
    ],
)
def test_a_record_of_what_cannot_be_names_who_said_it(rows: list[Contribution], shared: bool, why: str) -> None:
    said = replace(RECORD, contributions=tuple(rows)).impossible(shared)
    assert re.match(why or "^$", said)
