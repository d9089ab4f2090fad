"""Goodput: the papers' figures, from rows one at a time, the same as summary.json's."""

import pickle
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.analysis.goodput import Goodput, Median
from tests.support.lighthouse import day


def commit(t, step, contributors=(0, 1, 2, 3), step_s=1.0, total=4, **waits):
    who = list(contributors)
    return {"t": t, "step": step, "step_s": step_s, "contributors": who, "total": total, "waits": waits}


def ev(t, event, **facts):
    return {"t": t, "event": event, **facts}


def fold(rows):
    goodput = Goodput()
    for row in rows:
        if "event" in row:
            goodput.event(row)
        else:
            goodput.commit(row)
    return goodput


def adds_up(found):
    assert sum(found["lost_s"].values()) == pytest.approx(max(0.0, found["wall_s"] - found["useful_s"]))
    assert all(seconds >= 0 for seconds in found["lost_s"].values())


def wall_s(rows):
    """Seconds from the start of the first step to the last commit."""
    return rows[-1]["t"] - rows[0]["t"] + rows[0]["step_s"]


def test_lost_time_in_the_words_of_ml_goodput():
    """One of four is away for 4 of 10 steps of a second; the ring is built again before the first, in 1.5 s."""
    rows = [commit(n, n) for n in range(1, 5)]
    rows += [ev(4.1, "ProcessExited"), ev(4.2, "EpochGranted"), ev(5.7, "RingConnected")]
    rows += [commit(n + 1.6, n, (0, 1, 2) if n < 9 else (0, 1, 2, 3)) for n in range(5, 11)]
    found = fold([*rows[:-1], rows[-1] | {"step_s": 1.25}]).effective()
    assert found["badput_s"] == {
        "PROGRAM_STARTUP": 0,
        "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": 0,
        "ELASTIC_SLICE_DOWN": pytest.approx(0.1),
        "ELASTIC_REINITIALIZATION": pytest.approx(1.5),
        "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME": 0,
        "WASTED_PROGRESS_FROM_DISRUPTION": 0,
        "CUSTOM_BADPUT_EVENTS": 0,
        "OTHER": pytest.approx(0),
    }
    assert found["slice_efficiency"] == pytest.approx(1 - 0.25 * (2.6 + 3) / 10.6)
    assert found["step_deviation_s"] == pytest.approx(0.25)
    assert sum(found["badput_s"].values()) + found["lost_s"]["missing"] == pytest.approx(11.6 - found["useful_s"])


def test_missing_never_falls_while_a_run_goes_on():
    """Steps get shorter, so the usual step does: what fewer contributors have cost stays what it was."""
    goodput, seen = Goodput(), 0.0
    for step in range(1, 200):
        row = {
            "t": 1000.0 + step,
            "step": step,
            "step_s": 2.0 / (1 + step / 50),
            "waits": {},
            "total": 4,
            "epoch": 1,
        }
        goodput.commit(row | {"contributors": [0, 1, 2] if step % 5 == 0 else [0, 1, 2, 3]})
        lost = goodput.effective()["lost_s"]["missing"]
        assert lost >= seen - 1e-9
        seen = lost
    assert seen > 0


def test_it_is_the_ratio_of_summary_json():
    rows = [e.row for e in day.day(replicas=4, hours=2, seed=11)]
    commits = [r for r in rows if "step_s" in r]
    typical = fold(commits).steps.median
    ratio = sum(typical * len(r["contributors"]) / 4 for r in commits) / wall_s(commits)
    found = fold(rows).effective()
    assert found["wall_clock"] == pytest.approx(ratio, rel=1e-3)
    assert found["wall_s"] == pytest.approx(wall_s(commits))
    adds_up(found)


def test_as_many_units_as_wanted_by_fewer_replicas_is_the_whole_of_a_step():
    """With `quorum.batch: constant` the others train the units of the one that is away, in a longer step."""
    rows, t = [], 0.0
    for n in range(1, 11):
        who, took = ((0, 1, 2), 4 / 3) if n > 5 else ((0, 1, 2, 3), 1.0)
        t += took
        rows.append(commit(t, n, who, took) | {"units": 12, "units_wanted": 12})
    found = fold(rows).effective()
    assert found["useful_s"] == pytest.approx(10)
    assert found["lost_s"]["missing"] == pytest.approx(5 / 3)
    assert found["lost_s"]["other"] == pytest.approx(0, abs=1e-9)
    half = fold([commit(n, n) | {"units": 6, "units_wanted": 12} for n in range(1, 11)]).effective()
    assert half["wall_clock"] == pytest.approx(0.5)
    adds_up(found)
    # Never more than two of three contribute (`quorum.allowed`): nothing is missing.
    two = [commit(n, n, (0, 1), total=3) | {"units": 9, "units_wanted": 9} for n in range(1, 11)]
    assert fold(two).effective()["lost_s"]["missing"] == 0
    assert fold([commit(n, n, (0, 1, 2)) for n in range(1, 11)]).effective()["lost_s"]["missing"] == 2.5


def test_steps_that_are_done_twice_count_once_with_replay():
    rows = [commit(n, n) for n in range(1, 7)] + [commit(n + 2, n) for n in range(5, 9)]
    found = fold(rows).effective()
    assert found["wall_clock"] == pytest.approx(1.0), "the paper's figure ignores it"
    assert found["with_replay"] == pytest.approx(0.8)
    assert found["lost_s"]["replay"] == pytest.approx(2.0)
    adds_up(found)


def test_renewal_is_the_time_between_failures_over_itself_and_what_one_takes():
    """19 minutes of training, then 10 that one failure takes: 19 / 29."""
    rows, t, step = [], 0.0, 0
    for life in range(10):
        for _ in range(18):
            t, step = t + 60, step + 1
            rows.append(commit(t, step, step_s=60.0))
        rows += [ev(t + 1, "FailureInjected"), ev(t + 301, "RingBroken"), ev(t + 541, "EpochGranted")]
        rows += [ev(t + 601, "RingConnected"), ev(t + 2, "ReplicaExited", kind="SIGKILL", incarnation=str(life))]
        t, step = t + 660, step + 1
        rows.append(commit(t, step, step_s=660.0))
    assert fold(rows).effective()["renewal"] is None
    found = fold(rows).effective(failed=True)
    assert found["renewal"] == pytest.approx(19 / 29, rel=1e-6)
    assert found["lost_s"]["detect"] == pytest.approx(3000)
    assert found["lost_s"]["quorum"] == pytest.approx(2400)
    assert found["lost_s"]["reconnect"] == pytest.approx(600)
    adds_up(found)


def test_causes_of_a_slow_step():
    calm = [commit(n, n, ftar=0.01, commit=0.01) for n in range(1, 40)]
    slow = commit(42, 40, step_s=3.0, ftar=1.21, commit=0.41)
    found = fold([*calm, slow]).effective()
    assert found["lost_s"]["ftar"] == pytest.approx(1.2)
    assert found["lost_s"]["commit"] == pytest.approx(0.4)
    assert found["lost_s"]["other"] == pytest.approx(0.4)
    fetched = fold([*calm, ev(39.5, "FetchStarted"), slow]).effective()
    assert fetched["lost_s"]["fetch"] == pytest.approx(0.4), "the others held their votes back for it"
    adds_up(found)
    adds_up(fetched)


def test_a_first_step_that_is_slow_is_the_startup():
    found = fold([commit(5, 1, step_s=5.0), *(commit(4 + n, n) for n in range(2, 9))]).effective()
    assert found["lost_s"]["startup"] == pytest.approx(4.0)
    adds_up(found)


@given(
    st.lists(
        st.tuples(
            st.floats(-1, 30),
            st.integers(0, 60),
            st.integers(0, 4),
            st.floats(0, 100),
            st.sampled_from(
                ["", "FailureInjected", "RingBroken", "EpochGranted", "RingConnected", "FetchStarted"]
            ),
        ),
        max_size=60,
    )
)
def test_whatever_comes_the_figures_are_figures(parts):
    goodput, t = Goodput(), 100.0
    for gap, step, contributors, step_s, event in parts:
        t += gap
        if event:
            goodput.event(ev(t, event))
        useful, took = goodput.commit(commit(t, step, range(contributors), step_s, ftar=step_s / 2))
        assert useful >= 0
        assert took >= 0
    found = goodput.effective()
    adds_up(found)
    assert 0 <= found["with_replay"] <= found["wall_clock"] <= 1


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200))
def test_the_median_is_near(values):
    found = Median()
    for value in values:
        found.add(value)
    assert found.exact() == pytest.approx(median(values), rel=0.012)


def test_the_median_is_exact_while_values_differ_and_its_memory_is_bounded():
    found = Median()
    for value in (5.0, 1.0, 3.0):
        found.add(value)
    assert found.exact() == 3.0
    found.add(4.0)
    assert found.exact() == 3.5
    for n in range(100_000):
        found.add(0.5 + n % 1000 / 1000)
    assert len(pickle.dumps(found)) < 20_000
    assert found.near() == pytest.approx(1.0, rel=0.02)


def test_memory_does_not_grow_with_what_workers_call_their_waits():
    goodput, sizes = Goodput(), []
    for n in range(2000):
        goodput.commit(commit(n, n, **{f"cause{n}": 0.1}))
        goodput.event(ev(n, "RingBroken"))
        sizes.append(len(pickle.dumps(goodput)))
    assert sizes[-1] < sizes[1000] + 2000
