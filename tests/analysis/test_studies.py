"""Made-up histories of failures, and what the results of a study say."""

import pytest

from ft_hsdp.analysis import studies
from ft_hsdp.analysis.studies import Outage, RingPeriod, memberships, observed, outages


def test_failures_are_spread_over_the_run_and_take_other_replicas_each_time() -> None:
    assert outages(2, 10, 2, 5, 100) == (Outage(0, 6, 10), Outage(1, 6, 10), Outage(2, 53, 10), Outage(3, 53, 10))
    assert outages(0, 10, 2, 5, 100) == ()


@pytest.mark.parametrize(("count", "length", "at_once"), [(2, 48, 1), (1, 10, 5)])
def test_failures_that_do_not_fit_are_refused(count: int, length: int, at_once: int) -> None:
    with pytest.raises(ValueError, match=str(at_once)):
        outages(count, length, at_once, 5, 100)


def test_who_is_in_the_ring_while_replicas_are_away() -> None:
    assert memberships([Outage(1, 6, 10), Outage(0, 10, 6)], 3) == (
        RingPeriod(1, (0, 1, 2)),
        RingPeriod(6, (0, 2)),
        RingPeriod(10, (2,)),
        RingPeriod(16, (0, 1, 2)),
    )


def test_the_memberships_of_a_run_have_those_who_are_behind() -> None:
    steps = [(1, [1, 0], [0, 1], 0), (2, [1, 0], [0, 1], 0), (3, [1, 0], [1], 0), (4, [1], [1], 1)]
    rows = [
        {"step": step, "ring": ring, "contributors": who, "contributions": [{"part": part}]}
        for step, ring, who, part in steps
    ]
    first, behind, alone = observed(rows)
    assert (first, behind) == (RingPeriod(1, (1, 0), (), False), RingPeriod(3, (1, 0), (0,), False))
    assert alone == RingPeriod(4, (1,)), "what the lost replica had was trained in a part of its own"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((2, "float32", 200, 3, "sqrt"), "d2x_fp32_for200_3reps_lr_sqrt"),
        ((6, "bfloat16", 20, 1, "constant_batch"), "d6x_bf16_for20_1reps_batch_constant"),
        ((0, "float32", 20, 1, "none"), "fp32_fault_free"),
    ],
)
def test_names_of_variants(given: tuple[int, str, int, int, str], name: str) -> None:
    assert studies.variant_name(*given) == name


# Results: the loss falls by 0.01 with each evaluation of 40 units, and `extra` is added.


def result(name: str, seed: int, extra: float, units: int = 4, away: tuple[int, int] | None = None) -> dict:
    counts, losses, done = [], [], 0
    for step in range(1, 101):
        now = 3 if away and away[0] <= step < away[1] else units
        done += now
        bump = 0.5 if away and away[0] <= step < away[1] else 0.0
        value = 3.0 - done / 4000 + seed / 1000 + extra + bump
        counts.append(now)
        losses += [(step, value)] if step % 10 == 0 else []
    ring = tuple(range(4))
    rings = {1: ring} | ({away[0]: ring[1:], away[1]: ring} if away else {})
    history = [{"first": first, "ring": who, "behind": ()} for first, who in rings.items()]
    return {"name": name, "seed": seed, "digest": "d", "units": counts, "eval": losses, "history": history}


WHOLE = [result("fp32_fault_free", seed, 0.0) for seed in (1, 2, 3)]


def test_a_variant_is_compared_after_as_many_units() -> None:
    (found,) = studies.judge([*WHOLE, result("d1x_fp32_for20_1reps_lr_none", 2, 0.004, away=(41, 61))])[3:]
    assert (found.units, found.away) == (380, pytest.approx(0.05))
    assert found.gap == pytest.approx(0.004), "fewer units are no gap by themselves"
    assert found.worst == pytest.approx(0.504)
    assert found.gone_after is None, "it is never within twice the spread, which is 0.001"


def test_when_the_deviation_of_a_failure_is_gone() -> None:
    (found,) = studies.judge([*WHOLE, result("d1x_fp32_for20_1reps_lr_none", 2, 0.0015, away=(41, 61))])[3:]
    assert found.gone_after == 9


def test_rates_are_compared_seed_by_seed() -> None:
    name = "d1x_fp32_for20_1reps_"
    none = [result(name + "lr_none", seed, 0.001 * seed, away=(41, 61)) for seed in (1, 2, 3)]
    sqrt = [result(name + "lr_sqrt", seed, 0.001 * seed + 0.01, away=(41, 61)) for seed in (1, 2, 3)]
    noisy = [result(name + "lr_linear", seed, 0.05 * (seed - 2), away=(41, 61)) for seed in (1, 2, 3)]
    one = result(name + "batch_constant", 1, 0.2)
    found = studies.judge([*WHOLE, *none, *sqrt, *noisy, one])
    by_name = {each.name.removeprefix(name): each for each in studies.differences(found)}
    assert by_name["lr_sqrt"].mean == pytest.approx(0.01)
    assert by_name["lr_sqrt"].differs
    assert not by_name["lr_linear"].differs
    assert not by_name["batch_constant"].differs, "one seed says nothing"
    lines = studies.table(found)
    assert len(lines) == 1 + len(found) + 3
    assert studies.document(found)["differences"][-1]["half"] is None


def test_more_seeds_than_the_table_of_quantiles_has() -> None:
    name = "d1x_fp32_for20_1reps_"
    whole = [result("fp32_fault_free", seed, 0.0) for seed in range(12)]
    ends = [result(name + rate, seed, 0.01 * (seed % 2)) for rate in ("lr_none", "lr_sqrt") for seed in range(12)]
    (found,) = studies.differences(studies.judge([*whole, *ends]))
    assert (found.seeds, found.mean, found.half) == (12, 0.0, 0.0)


def test_variants_without_a_reference_are_left_out() -> None:
    other = result("d1x_bf16_for20_1reps_lr_none", 1, 0.0)
    assert [each.name for each in studies.judge([*WHOLE, other])] == ["fp32_fault_free"] * 3
