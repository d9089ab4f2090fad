from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.train.trainer import Schedule, scheduled


def test_the_warm_up_is_linear_and_reaches_the_base() -> None:
    assert [scheduled("cosine", 2.0, n, 100, 4, 0.1) for n in (1, 2, 3, 4)] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("constant", 2.0, 2.0), ("linear", 1.1, 0.2), ("cosine", 1.1, 0.2)]
)
def test_each_schedule_in_the_middle_and_at_the_end(schedule: Schedule, middle: float, end: float) -> None:
    assert scheduled(schedule, 2.0, 54, 104, 4, 0.1) == pytest.approx(middle)
    assert scheduled(schedule, 2.0, 104, 104, 4, 0.1) == pytest.approx(end)
    assert scheduled(schedule, 2.0, 9999, 104, 4, 0.1) == pytest.approx(end)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 50), st.integers(0, 20))
def test_after_the_warm_up_it_never_rises(schedule: Schedule, steps: int, warmup: int) -> None:
    rates = [scheduled(schedule, 1.0, n, steps, warmup, 0.0) for n in range(max(1, warmup), steps + 1)]
    assert all(a >= b for a, b in itertools.pairwise(rates))
    assert all(0 <= rate <= 1 for rate in rates)
