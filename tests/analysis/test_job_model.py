"""The model of a job: the papers' figures from their inputs, and the closed forms where there are some."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_hsdp.analysis.costs import (
    HostAway,
    effective_ratio,
    restart_cost,
    swap_cost,
    wasted_time,
)
from ft_hsdp.analysis.job_model import SCOPES, Hazard, Hit, Outcome, System, Tier, simulate

MINUTE, DAY = 60.0, 86_400.0
FAILURES = 4000  # of a run at random times
POINTS = 0.5  # of a percent that a figure may be off


def last(*seconds):
    return {f"phase {n}": (each,) for n, each in enumerate(seconds)}


def run(system, hazard, failures=FAILURES, seed=1) -> Outcome:
    """The time of so many failures."""
    return simulate(system, hazard, failures * hazard.every_s, seed)


def regular(every_s, failures=500):
    return Hazard(every_s=every_s, hits=tuple(Hit(n * every_s) for n in range(1, failures)))


def percent(ratio, points=POINTS):
    return pytest.approx(100 * ratio, abs=points)


# FT-HSDP §6.1: a failure each 18 minutes, a step of 20 s, 10 minutes until a replica is back.
PER_18_MIN = regular(18 * MINUTE)
SYNCHRONOUS = System(step_s=(20.0,), restart=last(600), disk=Tier(100))


def ft_hsdp(replicas, stall, join=0.0):
    back = last(600 - join)
    return System(replicas=replicas, step_s=(20.0,), stall=last(stall), back=back, join=last(join))


def test_synchronous_restart_of_ft_hsdp():
    """8 / 18 by the wall clock, 18 / 28 between failures; 40.4 % of that with the steps that are repeated."""
    assert 100 * run(SYNCHRONOUS, PER_18_MIN, 500).wall_clock == percent(8 / 18) == pytest.approx(44.4, abs=POINTS)
    renewal = Hazard(every_s=18 * MINUTE, reading="renewal")
    kept = System(step_s=(20.0,), restart=last(600), disk=Tier(1))
    assert 100 * run(kept, renewal).wall_clock == percent(effective_ratio(18, 10), 1.0)
    replayed = effective_ratio(18, restart_cost(10, 20 / 60, 100))
    found = simulate(SYNCHRONOUS, renewal, 40_000 * renewal.every_s)
    assert 100 * found.with_replay == percent(replayed) == pytest.approx(40.4, abs=POINTS)


def test_no_progress_between_failures_that_come_faster_than_a_checkpoint():
    found = run(SYNCHRONOUS, PER_18_MIN, 100)
    assert effective_ratio(18, restart_cost(10, 20 / 60, 100), "wall_clock") == 0
    assert found.with_replay < 0.01
    assert found.fallbacks == found.failures == 99


@pytest.mark.parametrize(
    ("replicas", "printed"), [(2, 63.9), (4, 73.6), (8, 78.5), (12, 80.1), (16, 80.9), (20, 81.4)]
)
def test_replicas_of_ft_hsdp(replicas, printed):
    """3 minutes in which all stand still, 7 without one of the replicas."""
    found = run(ft_hsdp(replicas, 180), PER_18_MIN, 500)
    assert 100 * found.with_replay == percent(printed / 100)
    assert found.lost_s["missing"] / found.lost_s["phase 0"] == pytest.approx(7 / 3 / replicas, rel=0.01)


@pytest.mark.parametrize(("stall", "join", "printed"), [(180, 0, 80.1), (180, 100, 71.6), (90, 100, 79.2)])
def test_stalls_of_ft_hsdp(stall, join, printed):
    """As it is printed, as it ran (the rejoin takes 100 s), and with the two announced fixes."""
    assert 100 * run(ft_hsdp(12, stall, join), PER_18_MIN, 500).with_replay == percent(printed / 100)


def wasted_s(system, every_s=20 * DAY):
    found = run(system, Hazard(every_s=every_s))
    return (found.wall_s - found.useful_s) / found.failures


def test_wasted_time_of_gemini():
    """MT-NLG in minutes over 20 Gbps: 42 to write, 42 between, 42 to read; then GPT-2 100B, steps of 62 s."""
    nlg = System(step_s=(6.0,), disk=Tier(7, write_s=42), restart=last(42))
    assert wasted_s(nlg) == pytest.approx(wasted_time(42, 42, 42), rel=0.02) == pytest.approx(105, rel=0.02)
    step = (62.0,)
    kept = frozenset(SCOPES)
    gemini = wasted_s(System(step_s=step, memory=Tier(1, write_s=62), restart=last(3), kept=kept))
    assert gemini == pytest.approx(wasted_time(62, 62, 3), rel=0.02)
    high_freq = wasted_s(System(step_s=step, disk=Tier(9, write_s=481 + 81), restart=last(481)))
    assert high_freq / gemini == pytest.approx(1322 / 96, rel=0.02) == pytest.approx(13.8, rel=0.02)


@pytest.mark.parametrize(("per_day", "printed"), [(8, 95.3), (15, 91.1)])
def test_effective_time_of_gemini(per_day, printed):
    """15 s to see it, 162 s to serialise, 243 s to warm up; 93 s of steps are done again."""
    phases = last(15, 162, 243)
    system = System(step_s=(62.0,), memory=Tier(1, write_s=62), restart=phases, kept=frozenset(SCOPES))
    chance, between = random.Random(2), DAY / per_day  # of the formula: none fails during a recovery
    hits = tuple(Hit(between * (n + chance.uniform(0, 0.8))) for n in range(FAILURES))
    found = simulate(system, Hazard(hits=hits), FAILURES * between)
    assert 100 * found.with_replay == percent(effective_ratio(between, 420 + 93, "wall_clock"), 0.1)
    assert 100 * found.with_replay == percent(printed / 100)


def test_deadpool():
    """Lost 18 and 2,366 steps of 2.08 s after a checkpoint, 150 s to start again; from memory 32.6 and 29.8 s."""
    step, restart, kept = 2.08, 150.0, frozenset(SCOPES)
    first = 5018 * step
    second = (12_366 + 18) * step + restart
    system = System(step_s=(step,), disk=Tier(5000), restart=last(restart))
    checkpoints = simulate(system, Hazard(hits=(Hit(first), Hit(second))), 20_000 * step)
    swapped = System(step_s=(step,), restart=last(31.2), kept=kept)
    hits = (Hit(first), Hit(second - (18 + 0) * step - restart + 31.2))
    memory = simulate(swapped, Hazard(hits=hits), 20_000 * step)
    ours, theirs = (each.wall_s - each.useful_s for each in (memory, checkpoints))
    assert theirs == pytest.approx(5258.7, abs=0.1)
    assert theirs / ours == pytest.approx(84.3, abs=0.1)
    assert ours / theirs == pytest.approx(0.0119, abs=1e-4)
    often = run(swapped, Hazard(every_s=3600.0, reading="renewal"))  # §IV: half a step is lost, and the swap
    assert often.with_replay == pytest.approx(effective_ratio(3600, swap_cost(31.2, step, 0.5)), abs=0.002)


def test_fewer_ranks_until_there_is_another_host():
    """A replica waits 60 s for a host, then goes on with 3 of 4 ranks, and starts twice."""
    start, away = 30.0, 600.0
    system = System(replicas=2, back=last(start), replace_s=(away,), narrow=0.75, patience_s=60.0)
    host_away = HostAway(full=2.0, without=1.0, narrow=1.75, patience=60.0, start=start)
    one = Hazard(hits=(Hit(1000.0, 0, "host"),))
    found = simulate(system, one, 5000.0)
    assert 2 * found.lost_s["missing"] == pytest.approx(host_away.lost_shrinking(away))
    soon = replace(system, replace_s=(70.0,))  # it comes during the first start
    assert 2 * simulate(soon, one, 5000.0).lost_s["missing"] == pytest.approx(host_away.lost_shrinking(70.0))
    waits = simulate(System(replicas=2, back=last(start), replace_s=(away,)), one, 5000.0)
    assert 2 * waits.lost_s["missing"] == pytest.approx(host_away.lost_waiting(away))
    spare = System(replicas=2, swap=last(5.0), back=last(start), replace_s=(away,), spares=1)
    both = Hazard(hits=(Hit(1000.0, 0, "host"), Hit(1100.0, 1, "host"), Hit(3000.0, 0, "host")))
    found = simulate(spare, both, 5000.0)
    assert 2 * found.lost_s["missing"] == pytest.approx(5 + (away + start) + 5)  # no spare for the second


def test_a_rack_or_a_zone_takes_all_replicas_in_it():
    system = System(replicas=6, per_rack=2, per_zone=3, back=last(60), stall=last(1), silent=last(7))
    rack = simulate(system, Hazard(hits=(Hit(100.0, 3, "rack"),)), 1000.0)
    assert 6 * rack.lost_s["missing"] == pytest.approx(2 * (60 - 7))
    assert rack.lost_s["phase 0"] == 7  # no connection tells of a host that is gone
    kept = frozenset({"process"})
    whole = System(replicas=3, per_zone=3, back=last(60), restart=last(50), disk=Tier(10), kept=kept)
    zone = simulate(whole, Hazard(hits=(Hit(107.0, 1, "zone"),)), 1000.0)
    assert (zone.lost_s, zone.fallbacks) == ({"phase 0": 50, "replay": pytest.approx(7)}, 1)
    one_by_one = simulate(whole, Hazard(hits=(Hit(50.0, 0), Hit(50.0, 1), Hit(50.25, 2))), 100.0)
    assert (one_by_one.lost_s["phase 0"], one_by_one.fallbacks) == (
        pytest.approx(49.75),
        0,
    )  # the last one's state is in memory


def test_survivors_that_train_the_step_again():
    once = Hazard(hits=(Hit(100.75, 0),))
    kept, again = (System(replicas=2, again=each) for each in (False, True))
    assert "replay" not in simulate(kept, once, 200.0).lost_s
    assert simulate(again, once, 200.0).lost_s["replay"] == pytest.approx(0.75)


def test_a_state_in_memory_is_none_on_the_disk():
    """After a fall back in memory, the next one to the disk goes back to the checkpoint before both."""
    system = System(disk=Tier(100), kept=frozenset({"process"}))
    found = simulate(system, Hazard(hits=(Hit(157.5), Hit(190.5, None, "host"))), 300.0)
    assert found.lost_s == {"replay": pytest.approx(0.5 + 90)}
    late = System(disk=Tier(100, write_s=30.0))  # what was not written when a failure came is none later
    found = simulate(late, Hazard(hits=(Hit(310.0), Hit(340.0))), 400.0)
    assert found.lost_s == {"replay": pytest.approx(110 + 30)}
    late = System(disk=Tier(100, write_s=30.0, wait_s=10.0))  # the second state is not written yet
    found = simulate(late, Hazard(hits=(Hit(225.0),)), 300.0)
    assert found.lost_s["replay"] == pytest.approx(225 / 1.1 - 100)
    assert found.lost_s["checkpoint"] == pytest.approx(300 - 300 / 1.1)


def test_a_stall_that_begins_during_another_is_the_longer_of_both():
    system = System(replicas=4, stall=last(10), back=last(0.0))
    found = simulate(system, Hazard(hits=(Hit(100.0, 0), Hit(104.0, 1))), 200.0)
    assert found.lost_s["phase 0"] == pytest.approx(14)


def test_a_replica_that_is_lost_while_it_is_away_returns_later_and_nobody_waits():
    system = System(replicas=2, stall=last(10), back=last(60), join=last(3), restart=last(5), disk=Tier(1))
    found = simulate(system, Hazard(hits=(Hit(100.0, 0), Hit(130.0, 0))), 500.0)
    assert found.lost_s == {"phase 0": pytest.approx(10 + 3), "missing": pytest.approx((90 - 10) / 2)}
    both = simulate(system, Hazard(hits=(Hit(100.0, 0), Hit(130.0, 1))), 500.0)  # all start again: none joins
    assert both.lost_s == {"phase 0": pytest.approx(10 + 5), "missing": pytest.approx((30 - 10) / 2)}


times = st.floats(0, 50)
phases = st.dictionaries(st.sampled_from("abcd"), st.tuples(times, times), max_size=3)


@settings(max_examples=150)
@given(
    st.builds(
        System,
        replicas=st.integers(1, 5),
        step_s=st.tuples(st.floats(0.5, 2), st.floats(0.5, 2), st.floats(0.5, 2)),
        stall=phases,
        back=phases,
        swap=phases,
        join=phases,
        restart=phases,
        replace_s=st.tuples(times),
        again=st.booleans(),
        spares=st.integers(0, 2),
        narrow=st.sampled_from([0.0, 0.5]),
        kept=st.sets(st.sampled_from(SCOPES)).map(frozenset),
        disk=st.builds(Tier, st.integers(1, 30), times, st.floats(0, 3)),
        per_rack=st.integers(1, 2),
        per_zone=st.integers(1, 3),
    ),
    st.builds(
        Hazard,
        every_s=st.floats(5, 200),
        reading=st.sampled_from(["wall_clock", "renewal"]),
        mix=st.just({"process": 5.0, "host": 3.0, "rack": 1.0, "zone": 1.0}),
    ),
    st.integers(0, 9),
)
def test_time_adds_up_and_depends_on_the_seed_alone(system, hazard, seed):
    found = simulate(system, hazard, 1000.0, seed)
    assert found.useful_s + sum(found.lost_s.values()) == pytest.approx(1000.0)
    assert all(seconds >= -1e-6 for cause, seconds in found.lost_s.items() if cause != "other")
    assert 0 <= found.with_replay <= found.wall_clock + 1e-9
    assert found == simulate(system, hazard, 1000.0, seed)
