from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from benchmarks import lone, losses
from ft_hsdp.bench.results import ProgressLog


def commit(t: float, step: int, incarnation: str) -> dict[str, Any]:
    return {"t": t, "step": step, "incarnation": incarnation}


def test_a_replica_that_grows_repeats_no_step() -> None:
    rows = [commit(1.0, 7, "0-a-1"), commit(2.0, 8, "0-a-1")]
    assert lone.growth(rows) is None
    assert lone.growth(rows[:1]) is None
    assert lone.growth([*rows, commit(2.5, 9, "0-a-2")]) == lone.Growth(0.5, 0)
    assert lone.growth([*rows, commit(2.5, 8, "0-a-2")]) == lone.Growth(0.5, 1)
    assert lone.calm(rows, 2)
    assert not lone.calm(rows, 3)
    assert not lone.calm([*rows, commit(2.5, 9, "0-a-2")], 2)


@pytest.mark.soak
@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", losses.JOBS)
def test_50_random_losses_with_shrink_and_grow(name: str) -> None:
    (row,) = losses.losses(50, ProgressLog(sys.stdout), [name])
    assert (row["losses"], row["twice"], row["skipped"], row["breaches"]) == (50, 0, 0, [])
    assert row["replayed"]
    assert row["shrunk"] >= 10
    assert row["grown"] >= 5
    assert row["narrow_steps"] >= 20


@pytest.mark.proof
@pytest.mark.usefixtures("_nothing_left")
def test_a_lone_replica_loses_a_host_and_gets_it_back() -> None:
    (row,) = lone.lone(1, ProgressLog(io.StringIO()))
    assert row["lost_steps"]["max"] <= 1
    assert row["grow"]["repeated"] == 0
    assert row["beyond"]["p50_ms"] + row["step_ms"] == pytest.approx(row["new"]["p50_ms"])
    assert sum(row["phases"].values()) == pytest.approx(row["new"]["p50_ms"], rel=0.01)
