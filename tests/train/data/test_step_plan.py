import math

import numpy as np
import pytest
import torch

from ft_hsdp.core.commit import MAX_PARTS, MAX_ROWS, MAX_RUNS, Contribution, impossible
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.units import Places
from ft_hsdp.train.data.step_plan import MAX_MICRO_BATCHES, MicroBatch, StepPlan, checked_weight
from tests.support.refused import refused


def plan(*places: tuple[int, int], ledger: Ledger = Ledger((6,)), ranks: int = 2, accumulate: int = 3) -> StepPlan:  # noqa: B008
    return StepPlan(ledger, 0, ranks, accumulate, places)


def test_a_plan_says_which_micro_batch_of_which_batch_is_next() -> None:
    """Batches of 3 micro-batches of 2 ranks: unit 6 is the first one of batch 1."""
    steps = plan((0, 4), (8, 2))
    assert list(steps.left) == [MicroBatch(0, 1, 0, 6), MicroBatch(0, 1, 1, 8), MicroBatch(0, 2, 1, 14)]
    assert steps.begin() == MicroBatch(0, 1, 0, 6)
    assert [at.unit for at in steps.left] == [8, 14]
    assert steps.at(8) == MicroBatch(0, 2, 1, 14)


def test_what_is_trained_becomes_contributions_of_runs() -> None:
    steps = plan((0, 4), (8, 2))
    for loss in (2.0, 4.0, 6.0):
        steps.begin()
        steps.trained[-1].loss = loss
    assert steps.contributions(5) == (
        Contribution(5, 2, 0, 6, units=4),
        Contribution(5, 1, 0, 14, units=2),
    )
    assert steps.loss()() == 4.0


def test_with_weights_a_run_has_their_sum_and_the_loss_is_the_mean_over_them() -> None:
    steps = StepPlan(Ledger((6,)), 0, 2, 3, ((0, 4), (8, 2)), weighs=True)
    for loss, weight in ((2.0, 30), (math.nan, 0), (8.0, 10)):
        steps.begin()
        steps.trained[-1].weigh(weight)
        steps.trained[-1].loss = loss
        assert steps.trained[-1].scale() == weight
    assert steps.contributions(5) == (
        Contribution(5, 30, 0, 6, units=4),
        Contribution(5, 10, 0, 14, units=2),
    )
    assert steps.loss()() == 3.5


def test_a_step_of_which_nothing_counts_has_a_loss_that_json_knows() -> None:
    steps = StepPlan(Ledger((6,)), 0, 1, 1, ((0, 1),), weighs=True)
    steps.begin()
    steps.trained[-1].weigh(0)
    steps.trained[-1].loss = math.nan
    assert (steps.contributions(0), steps.loss()()) == ((Contribution(0, 0, 0, 6),), 0.0)


def test_a_weight_has_to_be_known_and_to_have_scaled_the_gradient() -> None:
    steps = StepPlan(Ledger((6,)), 0, 1, 1, ((0, 1),), weighs=True)
    steps.begin()
    for needs in (steps.trained[-1].scale, lambda: steps.contributions(0)):
        refused(needs, r"job.weigh: got None")
    steps.trained[-1].weigh(3)
    refused(lambda: steps.contributions(0), r"job.weigh: got 3")
    steps.trained[-1].weigh(4)
    assert steps.trained[-1].scale() == 4
    steps.trained[-1].weigh(4)
    refused(lambda: steps.trained[-1].weigh(5), r"job.weigh: got 5; allowed: 4")
    assert steps.contributions(0)[0].weight == 4


@pytest.mark.parametrize("weight", [0, 2**31, np.int64(7), torch.tensor(7)])
def test_a_weight_is_an_integer(weight: object) -> None:
    assert checked_weight(weight) == int(weight)  # type: ignore[call-overload]


@pytest.mark.parametrize("weight", [-1, 2**31 + 1, 1.0, True, None, "1", torch.tensor(1.5), math.nan])
def test_any_other_weight_is_refused(weight: object) -> None:
    refused(lambda: checked_weight(weight), r"^job.weigh: got .*; allowed: an integer from 0 to 2147483648$")


def test_a_plan_that_is_extended_after_its_end_begins_another_part() -> None:
    steps = plan((0, 4))
    steps.begin()
    assert steps.extend(((0, 4),)), "one is left"
    assert steps.extend(((0, 6),))
    steps.begin()
    steps.begin()
    assert not steps.extend(((0, 6),))
    assert steps.extend(((0, 6), (10, 2)))
    steps.begin()
    assert [(c.index, c.units, c.part) for c in steps.contributions(0)] == [(6, 6, 0), (16, 2, 1)]


def test_a_plan_may_shrink_to_what_is_trained_and_no_further() -> None:
    steps = plan((0, 6))
    steps.begin()
    steps.begin()
    assert steps.extend(((0, 2),)), "only a backward that reduces gradients ends a part"
    assert len(steps.left) == 1
    steps.begin()
    assert not steps.extend(((0, 2),))
    assert [(c.units, c.part) for c in steps.contributions(0)] == [(6, 0)]
    steps = plan((0, 6))
    steps.begin()
    steps.close(more=1)
    assert len(steps.left) == 1
    steps.close()
    assert not steps.left


@pytest.mark.parametrize("after", [1, 2, 3])
def test_one_micro_batch_may_become_one_two_or_three_after_its_forward(after: int) -> None:
    """Two were planned, so what the first one leaves is reduced inside the replica only after another one."""
    steps = plan((0, 4), accumulate=1)
    steps.begin()
    assert not steps.ordered
    steps.extend(((0, 2 * after),))
    assert steps.ordered
    assert len(steps.left) == max(1, after - 1)
    steps = plan((0, 2), accumulate=1)
    steps.begin()
    assert steps.extend(((0, 2 * after),)) is (after > 1)
    assert len(steps.left) == after - 1


def test_the_parts_of_a_step_fit_into_an_entry() -> None:
    """Each loss adds a part. After the last one, what an order asks for beyond is not waited for."""
    holes = tuple((0, 20 * n, 10) for n in range(MAX_RUNS + 3))
    ledger, done = Ledger((500,), holes), 0
    steps = plan((0, 2), ledger=ledger)
    while steps.left:
        while steps.left:
            steps.begin()
            done += 1
        asked: Places = ((0, 2 * done + 10),)
        units = steps.trainable(asked)
        steps.extend(asked)
    assert {c.part for c in steps.contributions(0)} == set(range(MAX_PARTS))
    assert units == 2 * done == sum(c.units for c in steps.contributions(0))
    steps = plan((0, 8), ledger=ledger)
    for grown in range(MAX_PARTS):
        steps.extend(((0, 10 * MAX_RUNS - 2 * MAX_PARTS + 2 + 2 * grown),))
        while steps.left:
            steps.begin()
    assert len(steps.contributions(0)) <= MAX_ROWS
    assert not impossible(steps.contributions(0))


def test_a_grant_that_asks_for_more_than_can_be_trained_is_cut() -> None:
    for places in (((0, 2**62),), ((2**61, 2**62), (0, 2**62))):
        steps = plan(*places)
        assert len(steps.left) == MAX_MICRO_BATCHES
        assert steps.trainable(places) == 2 * MAX_MICRO_BATCHES


def test_no_more_runs_are_trained_in_a_step_than_fit_into_an_entry() -> None:
    holes = tuple((0, 4 * n, 2) for n in range(MAX_RUNS + 3))
    steps = plan((0, 2 * (MAX_RUNS + 3)), ledger=Ledger((100,), holes))
    assert len(steps.left) == MAX_RUNS
    assert steps.trainable(((0, 2 * (MAX_RUNS + 3)),)) == 2 * MAX_RUNS
    assert steps.trainable(((0, 4),)) == 4


def of_rank(rank: int, *places: tuple[int, int], ledger: Ledger) -> StepPlan:
    """The plan of one of two ranks that are left of three; batches have two micro-batches of three ranks."""
    return StepPlan(ledger, 0, 2, 2, places, data_rank=rank, of_batch=3)


def test_fewer_ranks_train_the_units_in_their_order() -> None:
    """Unit 5 is micro-batch 1 of rank 2 of batch 0, unit 6 is the first one of batch 1."""
    first, second = (of_rank(rank, (0, 4), ledger=Ledger((4,))) for rank in (0, 1))
    assert list(first.left) == [MicroBatch(0, 0, 1, 4, 1), MicroBatch(0, 1, 0, 6, 0)]
    assert list(second.left) == [MicroBatch(0, 0, 1, 5, 2), MicroBatch(0, 1, 0, 7, 1)]
    assert [at.units for at in first.left] == [((4, 2),), ((6, 2),)]


def test_a_micro_batch_may_be_cut_over_holes() -> None:
    """Three units are missing below the cursor: the second micro-batch takes the last one and the cursor's."""
    ledger = Ledger((12,), ((0, 3, 3),))
    plans = [of_rank(rank, (0, 4), ledger=ledger) for rank in (0, 1)]
    assert [[at.unit for at in plan.left] for plan in plans] == [[3, 5], [4, 12]]
    assert plans[0].left[1].units == ((5, 1), (12, 1))
    for plan in plans:
        while plan.left:
            plan.begin()
    said = [[(c.index, c.units, c.weight) for c in plan.contributions(0)] for plan in plans]
    assert said == [[(3, 3, 2), (12, 1, 0)], [(3, 3, 1), (12, 1, 1)]], "a rank counts what it has trained"
    assert plans[0].trainable(((0, 5),)) == 4, "one unit is left out"
