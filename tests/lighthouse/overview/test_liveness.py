import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.traces import GroupTrace, RankTrace
from ft_hsdp.protocol import RankBeat
from lighthouse.overview.liveness import SILENT_S, SLOW, SLOW_NO_MORE, STUCK_S, WINDOW, Stragglers, Vitals

TRACE = RankTrace((GroupTrace("0:0", 8, 7),))
BOUND = 64 << 10  # bytes of all that is remembered of four replicas


def row(step, busy, wait=0.0, contributors=(0, 1, 2), role="contribute"):
    waits = {"ftar": wait * 0.9, "commit": wait * 0.1}
    told = {"step": step, "epoch": 7, "step_s": busy + wait, "waits": waits, "role": role}
    return {**told, "contributors": list(contributors)}


def run(stragglers, steps, busy, start=1, micro_batches=None):
    """Feed steps of which `busy(step)` gives the busy seconds of each replica; all wait for the slowest.

    `micro_batches`: of each rank, by replica; one each by default.
    """
    found = []
    for step in range(start, start + steps):
        here = busy(step)
        for replica, mine in here.items():
            waited = row(step, mine, max(here.values()) - mine, tuple(here))
            found += stragglers.add(replica, waited, (micro_batches or {}).get(replica, 1))
    return found


def slow(_):
    return {0: 1.0, 1: 2.5, 2: 1.0}


def even(_):
    return {0: 1.0, 1: 1.1, 2: 0.9}


@pytest.fixture
def stragglers():
    return Stragglers(3)


def test_a_slow_replica_is_found_after_so_many_steps_and_once(stragglers):
    assert run(stragglers, SLOW - 1, slow) == []
    (found,) = run(stragglers, 1, slow, SLOW)
    assert (found.replica, found.over, found.witnesses, found.epoch) == (1, False, 2, 7)
    assert found.reason.startswith("busy 2.50 s")
    assert run(stragglers, 50, slow, SLOW + 1) == []


def test_it_is_none_any_more_only_after_many_good_steps(stragglers):
    run(stragglers, WINDOW, slow)
    good = WINDOW - SLOW_NO_MORE
    assert run(stragglers, good - 1, even, WINDOW + 1) == []
    (found,) = run(stragglers, 1, even, WINDOW + good)
    assert (found.replica, found.over) == (1, True)


def test_one_that_wavers_does_not_flap(stragglers):
    found = run(stragglers, 400, lambda step: slow(step) if step % 6 else even(step))
    assert [(v.replica, v.over) for v in found] == [(1, False)]


def test_a_slow_link_makes_nobody_a_straggler(stragglers):
    for step in range(1, 100):
        for replica in range(3):
            assert stragglers.add(replica, row(step, 1.0, 5.0)) == []


@pytest.mark.parametrize(
    ("busy", "slow"),
    [({0: 1.0, 1: 2.5}, [1]), ({0: 0.01, 1: 0.04, 2: 0.01}, []), ({0: 9.0}, [])],
    ids=["one of two is measured by the other", "a tiny difference is no trouble", "one alone is not judged"],
)
def test_who_is_slow_beside_the_others(busy, slow):
    assert [found.replica for found in run(Stragglers(len(busy)), 100, lambda _: busy)] == slow


def test_one_that_trains_more_is_compared_for_each_micro_batch(stragglers):
    """With `quorum.batch: constant` a replica may have two micro-batches where another has one."""
    quotas = {0: 1, 1: 3, 2: 1}
    assert run(stragglers, WINDOW, slow, micro_batches=quotas) == []
    (found,) = run(Stragglers(3), SLOW, lambda _: {0: 1.0, 1: 6.5, 2: 1.0}, micro_batches=quotas)
    assert found.reason.startswith("busy 6.50 s")


def test_a_replica_that_claims_to_have_been_very_fast_is_no_second_witness():
    (found,) = run(Stragglers(3), SLOW, lambda _: {0: 0.01, 1: 2.1, 2: 1.1})
    assert (found.replica, found.witnesses) == (1, 1)


def test_relays_are_not_judged(stragglers):
    for step in range(1, 50):
        assert stragglers.add(0, row(step, 1.0)) == []
        assert stragglers.add(1, row(step, 9.0, role="behind")) == []


def test_rows_that_come_late_or_never_hold_nothing_up(stragglers):
    found = []
    for step in range(1, 60):
        found += stragglers.add(0, row(step, 1.0, 1.5))
        found += stragglers.add(1, row(step, 2.5))
    assert [(v.replica, v.over) for v in found] == [(1, False)], "replica 2 has told of nothing"


def test_what_comes_back_is_another_process(stragglers):
    run(stragglers, WINDOW, slow)
    stragglers.forget(1)
    assert 1 not in stragglers.busy_s
    (found,) = run(stragglers, SLOW, slow, WINDOW + 1)
    assert (found.replica, found.over) == (1, False)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10_000), st.floats(0, 10)), max_size=200))
def test_memory_is_bounded_whatever_comes(rows):
    stragglers = Stragglers(4)
    for replica, step, busy in rows:
        stragglers.add(replica, row(step, busy, contributors=(0, 1, 2, 3)))
    assert len(pickle.dumps(stragglers)) < BOUND


def test_steps_that_go_down_are_bounded_too(stragglers):
    for step in range(10_000, 0, -1):
        stragglers.add(0, row(step, 1.0))
    assert len(pickle.dumps(stragglers)) < BOUND


def test_while_a_loop_pauses_no_replica_is_stalled_for_want_of_progress():
    vitals, silent = Vitals(), SILENT_S / 2
    now = 0.0
    while now < 3 * STUCK_S:
        vitals.hear(0, [RankBeat(0, 7, "h", 5, "evaluation")], now)
        vitals.hear(1, [RankBeat(0, 8, "h", 5)], now)
        assert vitals.judge([0, 1], 1.0, now) == []
        assert vitals.pauses(now) == {0: "evaluation"}
        now += silent
    over = now
    while now < over + STUCK_S + 2 * silent:
        vitals.hear(0, [RankBeat(0, 7, "h", 5)], now)
        vitals.hear(1, [RankBeat(0, 8, "h", 5)], now)
        found = vitals.judge([0, 1], 1.0, now)
        now += silent
        if found:
            break
    assert [change.replica for change in found] == [0, 1]
    assert vitals.pauses(now) == {}


def test_a_replica_that_falls_silent_in_a_pause_is_stalled():
    vitals = Vitals()
    vitals.hear(0, [RankBeat(0, 7, "h", 5, "evaluation")], 0.0)
    (change,) = vitals.judge([0], 1.0, 2 * SILENT_S)
    assert "no beat of rank 0" in change.reason
    assert vitals.pauses(2 * SILENT_S) == {}


def test_a_rank_is_known_by_its_newest_trace_until_it_gets_on() -> None:
    """Traces of many ranks take turns in messages, and one that gets on repeats its trace for a moment."""
    vitals, now = Vitals(), 0.0
    for trace, still_s in ((TRACE, 1.0), (None, 4.0), (None, 0.0), (TRACE, 0.0)):
        vitals.hear(0, [RankBeat(0, 7, "h", 5, "", still_s, trace)], now)
        (known,) = vitals.known(now + 0.5)
        assert (known.age_s, known.still_s, known.trace) == (0.5, still_s, TRACE)
    vitals.hear(0, [RankBeat(0, 8, "h", 5)], now)
    (known,) = vitals.known(now)
    assert known.trace is None, "another process"
