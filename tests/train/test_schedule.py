import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.train.trainer import factor


def scheduled(schedule: str, step: int, steps: int, warmup: int, min_ratio: float) -> float:
    lr = SimpleNamespace(schedule=schedule, warmup=warmup, min_ratio=min_ratio)
    config: Any = SimpleNamespace(lr=lr, train=SimpleNamespace(steps=steps))
    return factor(config, step)


def test_the_warm_up_is_linear_and_reaches_the_base() -> None:
    assert [scheduled("cosine", n, 100, 4, 0.1) for n in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_each_schedule_in_the_middle_and_at_the_end(schedule: str, middle: float, end: float) -> None:
    assert scheduled(schedule, 54, 104, 4, 0.1) == pytest.approx(middle)
    assert scheduled(schedule, 104, 104, 4, 0.1) == pytest.approx(end)
    assert scheduled(schedule, 9999, 104, 4, 0.1) == pytest.approx(end)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 50), st.integers(0, 20))
def test_after_the_warm_up_it_never_rises(schedule: str, steps: int, warmup: int) -> None:
    rates = [scheduled(schedule, n, steps, warmup, 0.0) for n in range(max(1, warmup), steps + 1)]
    assert all(a >= b for a, b in itertools.pairwise(rates))
    assert all(0 <= rate <= 1 for rate in rates)
