import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.overview.series import COLUMNS, Series


def record(t, step=0, loss=1.0, step_s=1.0, healthy=3.0, units=6.0, useful=1.0, gap=1.0):
    return (t, step, loss, step_s, 2.0, healthy, 1.0, units, useful, gap)


def filled(n, **changes):
    series = Series()
    for t in range(n):
        series.add(record(float(t), t, **{k: f(t) for k, f in changes.items()}))
    return series


def test_few_commits_are_shown_as_they_are():
    found = filled(10, loss=lambda t: 10.0 - t).between(0, 100, 600)
    assert tuple(found) == COLUMNS
    assert found["t"] == [float(t) for t in range(10)]
    assert found["step"] == list(range(10))
    assert found["loss"] == [10.0 - t for t in range(10)]
    assert found["effective"] == [1.0] * 10


def test_of_many_the_longest_step_and_the_fewest_replicas_stay_visible():
    found = filled(
        20_000, step_s=lambda t: 60.0 if t == 7777 else 1.0, healthy=lambda t: 2.0 if t == 15_000 else 3.0
    ).between(0, 20_000, 100)
    assert len(found["t"]) <= 100
    assert found["step_s"].count(60.0) == 1
    assert found["healthy"].count(2) == 1
    assert found["t"][found["step_s"].index(60.0)] == pytest.approx(7777, abs=250)


def test_loss_is_the_mean_of_a_bucket_and_leaves_out_what_is_none():
    found = filled(1000, loss=lambda t: math.nan if t % 2 else 4.0).between(0, 1000, 10)
    assert found["loss"] == [4.0] * len(found["loss"])
    assert filled(4, loss=lambda t: math.nan).between(0, 10, 10)["loss"] == [None] * 4


def test_the_fewest_units_of_a_bucket_stay_visible_and_rows_without_units_are_left_out():
    found = filled(20_000, units=lambda t: 4.0 if t == 7777 else 6.0).between(0, 20_000, 100)["units"]
    assert (found.count(4), found.count(6)) == (1, len(found) - 1)
    assert filled(1000, units=lambda t: math.nan if t % 2 else 6.0).between(0, 1000, 10)["units"][0] == 6
    assert filled(4, units=lambda t: math.nan).between(0, 10, 10)["units"] == [None] * 4


def test_effective_is_the_useful_share_of_a_bucket():
    found = filled(1000, gap=lambda t: 11.0 if t % 10 == 0 else 1.0).between(0, 1000, 20)
    assert found["effective"] == pytest.approx([0.5] * len(found["effective"]), abs=0.06)


def test_an_old_hour_is_still_there_when_the_raw_rows_are_gone():
    series = filled(100_000)
    old = series.between(10_000, 13_600, 600)
    assert 200 <= len(old["t"]) <= 600
    assert old["t"][0] == pytest.approx(10_000, abs=20)
    assert old["t"][-1] == pytest.approx(13_600, abs=20)
    new = series.between(99_000, 100_000, 2000)
    assert new["t"] == [float(t) for t in range(99_000, 100_000)]


def test_nothing_is_lost_between_levels():
    for n in (3, 4, 5, 63, 64, 65, 4095, 4097):
        found = filled(n, useful=lambda t: 1.0).between(0, n, 7)
        assert found["step"][-1] == n - 1
        raw = filled(n)
        assert sum(1 for _ in raw.between(0, n, 10**6)["t"]) == n


def test_a_span_without_commits_is_empty():
    assert filled(100).between(5000, 6000, 100)["t"] == []
    assert Series().between(0, 1, 10) == {name: [] for name in COLUMNS}


@given(st.lists(st.floats(-5, 50), max_size=300), st.floats(-100, 5000), st.floats(0, 5000), st.integers(1, 50))
def test_every_span_of_any_rows_gives_at_most_the_points_asked_for(gaps, start, length, points):
    series, t = Series(), 0.0
    for n, gap in enumerate(gaps):
        t += gap
        series.add(record(t, n))
    found = series.between(start, start + length, points)
    assert {len(column) for column in found.values()} == {len(found["t"])}
    assert len(found["t"]) <= points


def test_a_day_of_steps_is_answered_in_bounded_memory():
    series = filled(300_000)
    for points in (600, 1200):
        assert len(series.between(300_000 - 86_400, 300_000, points)["t"]) <= points
    assert len(pickle.dumps(series)) < 4 << 20
