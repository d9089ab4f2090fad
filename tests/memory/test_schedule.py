from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.memory.schedule import CREDIT_S, FITTED, HELD_UP, LATE, SLOWEST, CopyInterval, fit, profile, schedule


def plan(
    spans: list[float], size: int, copies: int = 2, mu: float = 0.9, open_end: bool = True
) -> tuple[tuple[int, int, int, int], ...]:
    return schedule(spans, size, copies, 4, 128, 1000.0, 0.001, mu, open_end)


def test_algorithm_2() -> None:
    """As printed it gives 17, 32, 19, ... and leaves parts of the spans unused."""
    expected = ((0, 0, 0, 17), (1, 0, 17, 32), (1, 0, 49, 11), (2, 0, 60, 32), (2, 0, 92, 8))
    assert plan([0.02, 0.05, 0.01], 100) == expected


def test_a_span_shorter_than_the_fixed_cost_is_passed_over() -> None:
    """The algorithm as printed does not end here."""
    assert {piece[0] for piece in plan([0.001, 0.0, 0.05], 10)} == {2}
    assert plan([0.001, 0.0], 10, open_end=False) == ()
    assert plan([], 10) == ()


@given(
    st.lists(st.floats(0, 0.2), min_size=1, max_size=8),
    st.integers(0, 2000),
    st.integers(1, 4),
    st.floats(0.05, 1),
)
def test_chunks_fit_into_their_spans_and_cover_each_copy_once(spans, size, copies, mu) -> None:
    pieces = schedule(spans, size, copies, 4, 128, 1000.0, 0.001, mu)
    assert sum(piece.size for piece in pieces) == (copies - 1) * size
    at = dict.fromkeys(range(copies - 1), 0)
    for piece in pieces:
        assert piece.offset == at[piece.copy], "without a hole"
        at[piece.copy] += piece.size
        assert 0 < piece.size <= 32
    assert [piece[:3] for piece in pieces] == sorted(piece[:3] for piece in pieces)
    for index, length in enumerate(spans[:-1]):
        time = sum(0.001 + piece.size / 1000.0 for piece in pieces if piece.span == index)
        assert time <= mu * length + 1e-6
    closed = schedule(spans, size, copies, 4, 128, 1000.0, 0.001, mu, open_end=False)
    before_last = [piece for piece in pieces if piece.span < len(spans) - 1]
    assert list(closed[: len(before_last)]) == before_last


@pytest.mark.parametrize(
    "changed",
    [{"mu": 0.0}, {"mu": 1.1}, {"parts": 0}, {"bandwidth": 0.0}, {"alpha": -1.0}, {"copies": 0}, {"reserve": 3}],
)
def test_numbers_out_of_range_are_refused(changed: dict[str, float]) -> None:
    arguments = {"spans": [1.0], "size": 1, "copies": 2, "parts": 4, "reserve": 128}
    arguments |= {"bandwidth": 1.0, "alpha": 0.0, "mu": 0.5}
    with pytest.raises(ValueError, match="mu <= 1"):
        schedule(**(arguments | changed))  # type: ignore[arg-type]


def test_steps_that_are_alike_are_steady() -> None:
    found = profile([(0.1, 0.2), (0.102, 0.198), (0.098, 0.202)])
    assert found.spans == pytest.approx((0.1, 0.2))
    assert found.steady
    assert not profile([(0.1, 0.2), (0.15, 0.2), (0.05, 0.2)]).steady
    assert profile([(1e-6, 1.0), (3e-6, 1.0)]).steady, "a short span does not count"


def test_one_step_in_ten_may_be_unlike_the_others() -> None:
    """An evaluation between two steps is a long idle span; copies still keep to the plan of the other steps."""
    usual, evaluated = (0.1, 0.2), (8.7, 0.2)
    found = profile([evaluated, *[usual] * 9, evaluated, *[usual] * 9])
    assert found.steady
    assert found.spans == pytest.approx(usual)
    assert not profile([evaluated, *[usual] * 9, *[evaluated] * 2, *[usual] * 8]).steady
    assert profile([(0.3,), *[usual] * 9, evaluated, *[usual] * 9]).steady, "together one in ten"
    assert not profile([(0.3,), (0.3,), *[usual] * 8, evaluated, *[usual] * 9]).steady


def test_steps_with_other_numbers_of_spans_are_rare_or_unsteady() -> None:
    step = (0.1, 0.2)
    assert profile([step] * 19 + [(0.3,)]).steady
    assert profile([step] * 5 + [(0.3,)] * 5).deviation == inf
    assert not profile([]).steady
    assert not profile([()] * 20).steady


@given(st.floats(0, 0.01), st.floats(1e6, 1e10))
def test_the_cost_of_pieces_is_found(alpha: float, bandwidth: float) -> None:
    pieces = [(size, alpha + size / bandwidth) for size in (1 << 16, 1 << 20, 1 << 22)]
    found = fit(pieces)
    assert found[0] == pytest.approx(alpha, abs=1e-6)
    assert found[1] == pytest.approx(bandwidth, rel=1e-3)


@pytest.mark.parametrize("pieces", [[], [(4, 1.0)], [(4, 1.0), (4, 2.0)], [(4, 2.0), (8, 1.0)]])
def test_pieces_that_say_nothing_are_refused(pieces: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="pieces"):
        fit(pieces)


def after(interval: CopyInterval, waited_s: float, step_s: float, steps: int, late: bool = False) -> CopyInterval:
    """The interval after so many steps, all alike, or once it changes."""
    for _ in range(0, steps, interval.every):
        changed = interval.after(waited_s, step_s, late=late)
        if changed.every != interval.every:
            return changed
        interval = changed
    return interval


def test_copies_that_hold_up_steps_become_fewer_and_more_again() -> None:
    interval = after(CopyInterval.of(1), 0.19, 10.0, 1000)
    assert interval.every == 1, "1.9 % of the time"
    interval = after(interval, 0.5, 10.0, 11)
    assert interval.every == 2, "5 %"
    assert [step for step in range(6) if interval.due(step)] == [0, 2, 4]
    assert after(interval, 0.3, 10.0, 2 * FITTED).every == 2, "3 % of one step in two is 1.5 %"
    steps = 0
    while interval.every == 2:
        interval, steps = interval.after(0.1, 10.0), steps + 2
    assert (interval.every, steps) == (1, FITTED)


@pytest.mark.parametrize(
    ("step_s", "waited_s"), [(0.05, 0.04), (0.34, 0.24), (1.0, 0.03), (10.0, 1.0), (150.0, 8.0)]
)
def test_waits_come_to_two_percent_of_the_time_and_the_first_credit(step_s: float, waited_s: float) -> None:
    """Copies of every second state cost nothing here, and those of each state too much."""
    interval, waits, credit_s = CopyInterval.of(1), 0.0, max(CREDIT_S, 6 * HELD_UP * step_s)
    for step in range(1, 5000):
        if interval.due(step):
            cost_s = waited_s if interval.every == 1 else 0.0
            waits += cost_s
            interval = interval.after(cost_s, step_s)
        assert waits <= 1.01 * HELD_UP * step_s * step + credit_s + waited_s
    assert waits > credit_s / 2


@pytest.mark.parametrize("step_s", [0.05, 1.0, 150.0])
def test_one_long_wait_changes_nothing_and_several_do(step_s: float) -> None:
    interval = after(CopyInterval.of(1).after(1e6, step_s), 0.0, step_s, 10)
    assert interval.every == 1
    assert interval.after(1e6, step_s).after(0.0, step_s).every == 1
    assert after(interval, 1e6, step_s, 2 * LATE).every == 2


@pytest.mark.parametrize(("waited_s", "step_s"), [(0.0, 0.1), (0.05, 0.1), (0.25, 0.1), (2.0, 150.0)])
def test_copies_that_are_never_complete_become_fewer(waited_s: float, step_s: float) -> None:
    interval = CopyInterval.of(1)
    for _ in range(5):
        interval = interval.after(waited_s, step_s, late=True).after(waited_s, step_s, late=True)
        interval = interval.after(0.0, step_s)
    assert interval.every == 1, "never three times in a row"
    assert after(interval, waited_s, step_s, LATE, late=True).every == 2


def test_an_interval_is_never_below_the_configured_one_nor_without_an_end() -> None:
    interval = CopyInterval.of(3)
    for _ in range(2 * FITTED):
        interval = interval.after(0.0, 1.0)
    assert interval.every == 3
    for _ in range(100):
        interval = interval.after(1e6, 1.0)
    assert interval.every == 3 * SLOWEST
