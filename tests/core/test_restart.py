from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.restart import REFILL_STEPS, GiveUp, Restart, RestartPolicy, RestartState, doubled, on_loss

POLICY = RestartPolicy(budget=3, backoff_s=1.0, backoff_max_s=3.0)


def test_the_first_restart_is_immediate_and_the_next_ones_wait_longer() -> None:
    assert [doubled(1.0, used, 3.0) for used in range(5)] == [0.0, 1.0, 2.0, 3.0, 3.0]
    worn = [RestartState(used=used) for used in range(3)]
    decisions = [on_loss(state, POLICY, 0, "SIGKILL")[1] for state in worn]
    assert [d.delay_s for d in decisions if isinstance(d, Restart)] == [0.0, 1.0, 2.0]


def test_a_crash_loop_ends_when_the_budget_is_used_up() -> None:
    state = RestartState()
    for n in range(1, 4):
        state, decision = on_loss(state, POLICY, 0, "SIGKILL")
        assert isinstance(decision, Restart)
        assert f"restart {n} of 3" in decision.reason
    state, decision = on_loss(state, POLICY, 0, "SIGKILL")
    assert decision == GiveUp("SIGKILL; the budget of 3 restarts is used up")
    assert state.restarts == 3


def test_progress_refills_the_budget_and_resets_the_backoff() -> None:
    worn = RestartState(restarts=3, used=3)
    state, decision = on_loss(worn, POLICY, REFILL_STEPS, "exit 75")
    assert state == RestartState(restarts=4, used=1)
    assert isinstance(decision, Restart)
    assert decision.delay_s == 0.0
    assert isinstance(on_loss(worn, POLICY, REFILL_STEPS - 1, "exit 75")[1], GiveUp)


def test_a_budget_of_zero_never_restarts() -> None:
    assert isinstance(on_loss(RestartState(), RestartPolicy(0, 0.0, 0.0), 0, "x")[1], GiveUp)


@given(st.lists(st.integers(0, 2 * REFILL_STEPS), max_size=40), st.integers(0, 5))
def test_never_more_than_budget_restarts_in_a_row_without_progress(committed: list[int], budget: int) -> None:
    policy = RestartPolicy(budget, 0.5, 4.0)
    state, row = RestartState(), 0
    for steps in committed:
        row = 0 if steps >= REFILL_STEPS else row
        state, decision = on_loss(state, policy, steps, "SIGKILL")
        if isinstance(decision, GiveUp):
            assert row == budget
            break
        row += 1
        assert row <= budget
        assert 0 <= decision.delay_s <= policy.backoff_max_s


@pytest.mark.parametrize("used", [1, 100, 10**6])
def test_a_pause_does_not_overflow(used: int) -> None:
    assert doubled(0.1, used, 30.0) <= 30.0


def test_a_life_that_found_no_lighthouse_costs_no_budget() -> None:
    """It is tried again as long as the job lasts, with growing pauses, whatever the budget."""
    policy = RestartPolicy(budget=1, backoff_s=0.0, backoff_max_s=8.0)
    state, delays = RestartState(restarts=1, used=1), []
    for _ in range(100):
        state, decision = on_loss(state, policy, 0, "exit 69", unreached=True)
        assert isinstance(decision, Restart)
        delays.append(decision.delay_s)
    assert delays[:5] == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert (state.restarts, state.used) == (101, 1)
    _, decision = on_loss(state, policy, 0, "exit 75")
    assert isinstance(decision, GiveUp)
