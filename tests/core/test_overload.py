from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.failure_detector import HALF_LIFE_S, MOST_S, WINDOW, HostLoad, PhiAccrual, Stalls

shares = st.floats(0, 1)


def test_a_quiet_host_asks_for_no_patience() -> None:
    assert HostLoad(pressure=0.05, runnable=1.5, stolen=0.0).stall_s == 0.0
    assert Stalls().expected_s(100.0) == 0.0


def test_as_many_processes_as_cores_can_serve_ask_for_none() -> None:
    assert HostLoad(pressure=1.0, runnable=2.0, stolen=0.0).stall_s == 0.0


def test_four_times_more_processes_than_cores_ask_for_half_a_second() -> None:
    assert HostLoad(pressure=1.0, runnable=4.0, stolen=0.0).stall_s == 0.5


def test_a_host_that_loses_its_cpus_to_others_asks_for_patience() -> None:
    assert HostLoad(pressure=0.0, runnable=1.0, stolen=0.2).stall_s == 1.0


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
    now, pulse = 1000.0, PhiAccrual(0.05, 0.5, 1000.0)
    for _ in range(WINDOW):
        now += 0.05
        pulse.heard(now)
    assert pulse.lost(now + 0.8)
    assert not pulse.lost(now + 0.8, stall_s=0.5)
    assert pulse.lost(now + 1.3, stall_s=0.5)
    assert pulse.lost(now + 0.8 + MOST_S, stall_s=MOST_S)
