import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.failure_detector import HALF_LIFE_S, MOST_S, WINDOW, HostLoad, PhiAccrual, Stalls, phi

BEAT_S, PAUSE_S = 0.1, 0.5
JITTER = Path(__file__).parents[1] / "ftar" / "beats_jitter.json"

anything = st.floats(-1e300, 1e300)
spans = st.floats(0.0, 1e9)
deviations = st.floats(1e-9, 1e6)
gaps = st.lists(st.floats(0.0, 10.0), max_size=300)


def beating(intervals: list[float]) -> tuple[PhiAccrual, float]:
    """A pulse that was heard after each of these intervals, and the time then."""
    now = 1e6
    pulse = PhiAccrual(BEAT_S, PAUSE_S, now)
    for each in intervals:
        now += each
        pulse.heard(now)
    return pulse, now


@given(anything, anything, deviations)
def test_phi_is_a_number_in_its_range(silence_s: float, mean_s: float, deviation_s: float) -> None:
    assert 0.0 <= phi(silence_s, mean_s, deviation_s) <= 300.0


@given(spans, spans, spans, deviations)
def test_more_silence_is_never_less_suspicious(a: float, b: float, mean_s: float, deviation_s: float) -> None:
    assert phi(min(a, b), mean_s, deviation_s) <= phi(max(a, b), mean_s, deviation_s)


@pytest.mark.parametrize(("deviations_late", "tail"), [(0, 0.5), (1, 0.1587), (2, 0.02275), (3, 0.00135)])
def test_phi_is_that_of_the_normal_distribution(deviations_late: int, tail: float) -> None:
    assert phi(1.0 + 0.1 * deviations_late, 1.0, 0.1) == pytest.approx(-math.log10(tail), abs=0.05)


@given(gaps, st.floats(0.0, PAUSE_S, exclude_max=True))
def test_a_pause_is_always_accepted(intervals: list[float], silence_s: float) -> None:
    pulse, now = beating(intervals)
    assert not pulse.lost(now + silence_s)


@given(gaps)
def test_whatever_came_before_a_stop_is_found(intervals: list[float]) -> None:
    """Noise makes it later, but not later than some pauses."""
    pulse, now = beating(intervals)
    assert pulse.lost(now + 5 * PAUSE_S)


def test_when_a_stop_of_a_regular_neighbour_is_found() -> None:
    pulse, now = beating([BEAT_S] * WINDOW)
    found = next(ms for ms in range(2000) if pulse.lost(now + ms / 1000))
    assert 600 < found < 750


def test_one_long_stop_does_not_hide_the_next_one_for_long() -> None:
    pulse, now = beating([BEAT_S] * WINDOW + [60.0] + [BEAT_S] * 20)
    assert pulse.lost(now + 2 * PAUSE_S)
    assert pulse.phi(now + 2 * PAUSE_S) < pulse.phi(now + 3 * PAUSE_S)


def test_noise_makes_it_more_patient_and_is_forgotten() -> None:
    chance = random.Random(1)
    noisy = [chance.uniform(0.0, 0.4) for _ in range(WINDOW)]
    pulse, now = beating(noisy)
    assert not pulse.lost(now + 0.9)
    pulse, now = beating(noisy + [BEAT_S] * WINDOW)
    assert pulse.lost(now + 0.9)


def test_a_clock_that_was_set_back_is_no_silence() -> None:
    pulse, now = beating([BEAT_S])
    assert pulse.silence(now - 5.0) == 0.0
    pulse.heard(now - 5.0)
    assert not pulse.lost(now - 5.0 + PAUSE_S / 2)
    assert pulse.lost(now)


def test_recorded_jitter_makes_no_suspect() -> None:
    """A million intervals between beats of processes that share two cores with twice as many busy ones. They are
    drawn in runs, for a late beat seldom comes alone. Recorded were beats of 50 ms: two of them are one."""
    recorded = json.loads(JITTER.read_text())
    intervals = [sum(pair) / 1000 for pair in pairwise(recorded["intervals_ms"])]
    chance = random.Random(1)
    pulse, now = PhiAccrual(BEAT_S, PAUSE_S, 0.0), 0.0
    worst = suspicions = drawn = 0
    while drawn < 1_000_000:
        start = chance.randrange(len(intervals) - 20)
        for interval in intervals[start : start + 20]:
            now += interval
            suspicions += pulse.lost(now)
            worst = max(worst, interval)
            pulse.heard(now)
            drawn += 1
    assert suspicions == 0
    assert worst > 2 * BEAT_S, "this was no jitter at all"
    assert all(a <= b for a, b in pairwise([pulse.phi(now + s / 10) for s in range(50)]))


shares = st.floats(0, 1)


@pytest.mark.parametrize(
    ("pressure", "runnable", "stolen", "patience_s"),
    [
        (0.05, 1.5, 0.0, 0.0),  # it is quiet
        (1.0, 2.0, 0.0, 0.0),  # as many processes as its cores can serve
        (1.0, 4.0, 0.0, 0.5),
        (0.0, 1.0, 0.2, 1.0),  # it loses its CPUs to others
    ],
)
def test_how_much_patience_a_host_asks_for(pressure, runnable, stolen, patience_s) -> None:
    assert HostLoad(pressure, runnable, stolen).stall_s == patience_s
    assert Stalls().expected_s(100.0) == 0.0


@given(shares, st.floats(0, 1000), shares, shares)
def test_more_load_is_never_less_patience(pressure: float, runnable: float, stolen: float, more: float) -> None:
    least = HostLoad(pressure * more, runnable * more, stolen * more).stall_s
    assert least <= HostLoad(pressure, runnable, stolen).stall_s


def test_the_longest_stall_of_late_counts_and_is_forgotten() -> None:
    stalls = Stalls()
    stalls.late(0.5, 100.0)
    stalls.late(0.01, 100.1)  # a small one does not hide it
    assert 0.9 < stalls.expected_s(100.1) <= 1.0
    half = stalls.expected_s(100.0 + HALF_LIFE_S)
    assert 0.49 < half < 0.51
    assert stalls.expected_s(100.0 + 20 * HALF_LIFE_S) < 0.001


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 5)), max_size=30))
def test_there_is_a_most(seen: list[tuple[float, float]]) -> None:
    stalls, now = Stalls(), 0.0
    for late_s, passed in seen:
        now += passed
        stalls.late(late_s, now)
        assert 0.0 <= stalls.expected_s(now) <= MOST_S


def test_a_neighbour_of_an_overloaded_host_has_more_time_and_is_found_in_the_end() -> None:
    pulse, now = beating([BEAT_S] * WINDOW)
    assert pulse.lost(now + 0.8)
    assert not pulse.lost(now + 0.8, stall_s=0.5)
    assert pulse.lost(now + 1.3, stall_s=0.5)
    assert pulse.lost(now + 0.8 + MOST_S, stall_s=MOST_S)
