import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.restart import (
    REFILL_STEPS,
    FatalUnits,
    GiveUp,
    NarrowEnds,
    Restart,
    RestartPolicy,
    RestartState,
    doubled,
    ends_all,
    essence,
    on_loss,
    on_narrow_end,
    on_shortage,
    on_start,
)

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
    assert isinstance(decision, GiveUp)
    assert state.restarts == 3


def test_progress_refills_the_budget_and_resets_the_backoff() -> None:
    worn = RestartState(restarts=3, used=3)
    state, decision = on_loss(worn, POLICY, REFILL_STEPS, "exit 75")
    assert state == RestartState(restarts=4, used=1)
    assert isinstance(decision, Restart)
    assert decision.delay_s == 0.0
    assert isinstance(on_loss(worn, POLICY, REFILL_STEPS - 1, "exit 75")[1], GiveUp)


@given(st.lists(st.integers(0, 2 * REFILL_STEPS), max_size=40), st.integers(0, 5))
def test_never_more_than_budget_restarts_in_a_row_without_progress(committed: list[int], budget: int) -> None:
    policy = RestartPolicy(budget, 0.5, backoff_max_s=4.0)
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


def test_an_end_of_fewer_ranks_costs_no_budget() -> None:
    worn = RestartState(restarts=4, used=3, unreached=2)
    state, decision = on_narrow_end(worn, POLICY, "SIGKILL")
    assert state == RestartState(restarts=5, used=3)
    assert decision.delay_s == POLICY.backoff_s
    assert "none of the budget" in decision.reason


def test_a_number_of_ranks_that_ends_twice_is_too_small_and_so_is_a_smaller_one() -> None:
    narrow = NarrowEnds().after_end(3)
    assert narrow.least == 1
    assert narrow.after_end(3).least == 4
    assert narrow.after_end(2).least == 3, "3 ranks have ended once, and two have as 3 would have"
    assert narrow.after_end(4).least == 4
    assert narrow.after_end(3).after_end(1).least == 4


def test_what_has_contributed_is_not_too_small() -> None:
    fits = NarrowEnds().after_end(3).after_end(2).after_contribution(3)
    assert (fits.blames(2), fits.blames(3), fits.blames(4)) == (True, False, False)
    assert fits.least == 1, "the end of 3 ranks was no sign"
    assert fits.after_end(2).least == 3
    assert fits.after_contribution(2).after_contribution(3).fits == 2
    assert NarrowEnds().blames(1)


def test_what_prevents_a_start_costs_no_budget_and_has_growing_pauses_until_it_has_lasted_too_long() -> None:
    state, now, pauses = RestartState(used=2), 1000.0, []
    while True:
        state, decision = on_shortage(state, POLICY, "no descriptor", now)
        if isinstance(decision, GiveUp):
            break
        pauses.append(decision.delay_s)
        now += decision.delay_s
    assert pauses[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert (sum(pauses), state.used, state.restarts) == (POLICY.shortage_s, 2, len(pauses))
    assert "restart.shortage_s" in decision.reason


def test_a_shortage_that_is_over_begins_anew_and_one_without_a_bound_never_ends() -> None:
    state, _ = on_shortage(RestartState(), POLICY, "x", 0.0)
    late = 2 * POLICY.shortage_s
    assert isinstance(on_shortage(state, POLICY, "x", late)[1], GiveUp)
    for over in (on_start(state), on_loss(state, POLICY, 0, "SIGKILL")[0]):
        _, decision = on_shortage(over, POLICY, "x", late)
        assert isinstance(decision, Restart)
        assert decision.delay_s == 1.0
    assert isinstance(on_shortage(state, POLICY, "another script", late, bounded=False)[1], Restart)


def test_an_error_that_comes_again_has_longer_and_longer_pauses() -> None:
    policy = RestartPolicy(budget=9, backoff_s=0.0, backoff_max_s=3.0)
    state, delays = RestartState(), []
    for error in ("A", "A", "A", "A", "B", "", "A"):
        state, decision = on_loss(state, policy, 0, "exit 75", error=error)
        assert isinstance(decision, Restart)
        delays.append(decision.delay_s)
    assert delays == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("KeyError: 'tokens'", "KeyError: 'labels'", False),
        ("ValueError: rank 3 has 17 rows", "ValueError: rank 0 has 4 rows", True),
        ("RuntimeError: <obj at 0x7f3a> is bad", "RuntimeError: <obj at 0x11bc> is bad", True),
        ("ValueError: /tmp/a8x/in.bin is odd", "ValueError: /tmp/tmpq/part/7 is odd", True),
    ],
)
def test_the_essence_of_an_error_has_no_numbers_addresses_and_temporary_paths(one, other, same) -> None:
    assert (essence(one) == essence(other)) == same


@pytest.mark.parametrize(
    ("ends", "all_of_them"),
    [
        ([("A", 2), ("A", 3)], True),
        ([("A", 2)], True),
        ([("A", 2), ("A", 1)], False),
        ([("A", 2), ("B", 2)], False),
        ([("A", 2), ("", 4)], False),
        ([("", 2)], False),
    ],
)
def test_one_error_ends_all_replicas_only_if_each_has_ended_by_it_again(ends, all_of_them) -> None:
    assert ends_all(ends) == all_of_them


A, B = (0, 8, 2), (1, 4, 2)  # runs of units


def after(*ends: tuple[int, tuple[int, int, int] | None, bool]) -> FatalUnits:
    units = FatalUnits()
    for replica, run, contributed in ends:
        units = units.after_end(replica, run, contributed)
    return units


def test_a_unit_that_ends_processes_again_is_blamed_whichever_replica_trained_it() -> None:
    assert after((0, A, True)).blamed == ()
    assert after((0, A, True), (0, None, False), (0, A, False)).blamed == (A,)
    assert after((0, A, True), (1, A, True)).blamed == (A,)
    assert after((0, A, True), (1, B, True)).blamed == ()


def test_what_fails_with_every_unit_is_not_the_fault_of_the_units() -> None:
    """A machine that ends each of its processes would use up all the data."""
    first = ((0, A, True), (0, A, False))
    assert after(*first, (0, B, False), (0, B, False), (0, B, False)).blamed == (A,)
    assert after(*first, (0, B, True), (0, B, False)).blamed == (A, B), "it has contributed in between"
    assert after(*first, (1, B, False), (1, B, False)).blamed == (A, B), "another replica is another machine"
