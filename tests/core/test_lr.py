from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core import lr


@pytest.mark.parametrize(
    ("contributors", "linear", "sqrt"), [(12, 1.0, 1.0), (11, 0.9167, 0.9574), (9, 0.75, 0.8660)]
)
def test_the_interventions_of_the_paper(contributors: int, linear: float, sqrt: float) -> None:
    assert lr.scale("linear", contributors, 12) == pytest.approx(linear, abs=5e-5)
    assert lr.scale("sqrt", contributors, 12) == pytest.approx(sqrt, abs=5e-5)
    assert lr.scale("none", contributors, 12) == 1.0


@pytest.mark.parametrize("contributors", [0, -1, 13])
def test_nobody_or_more_than_everybody_is_refused(contributors: int) -> None:
    with pytest.raises(ValueError, match=rf"within 1\.\.12, got {contributors}"):
        lr.scale("linear", contributors, 12)


@given(st.integers(1, 512).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
def test_linear_cuts_deeper_than_sqrt_and_neither_raises(pair: tuple[int, int]) -> None:
    contributors, total = pair
    linear, sqrt = (lr.scale(kind, contributors, total) for kind in ("linear", "sqrt"))
    assert 0 < linear <= sqrt <= 1
    assert (linear == 1) == (contributors == total)


def test_the_warm_up_is_linear_and_reaches_the_base() -> None:
    assert [lr.scheduled("cosine", 2.0, n, 100, 4, 0.1) for n in (1, 2, 3, 4)] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("constant", 2.0, 2.0), ("linear", 1.1, 0.2), ("cosine", 1.1, 0.2)]
)
def test_each_schedule_in_the_middle_and_at_the_end(schedule: lr.Schedule, middle: float, end: float) -> None:
    assert lr.scheduled(schedule, 2.0, 54, 104, 4, 0.1) == pytest.approx(middle)
    assert lr.scheduled(schedule, 2.0, 104, 104, 4, 0.1) == pytest.approx(end)
    assert lr.scheduled(schedule, 2.0, 9999, 104, 4, 0.1) == pytest.approx(end)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 50), st.integers(0, 20))
def test_after_the_warm_up_it_never_rises(schedule: lr.Schedule, steps: int, warmup: int) -> None:
    rates = [lr.scheduled(schedule, 1.0, n, steps, warmup, 0.0) for n in range(max(1, warmup), steps + 1)]
    assert all(a >= b for a, b in itertools.pairwise(rates))
    assert all(0 <= rate <= 1 for rate in rates)
