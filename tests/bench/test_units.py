from __future__ import annotations

import io
from typing import Any

import pytest

from benchmarks import units as bench
from benchmarks.unit_figures import beyond, constancy, micro_batch_s, unit_seconds
from ft_hsdp.bench.jobs import Kill
from ft_hsdp.bench.results import ProgressLog

ALL, REST = (0, 1, 2), (0, 2)


def commit(
    step: int, t: float, units: dict[int, int], *, step_s: float = 1.0, role: str = "contribute"
) -> dict[str, Any]:
    """A commit of replicas with so many units each; 6 are wanted."""
    return {
        "t": t,
        "step": step,
        "step_s": step_s,
        "role": role,
        "contributors": list(units),
        "contributions": [{"replica": n, "units": count} for n, count in units.items()],
        "units": sum(units.values()),
        "units_wanted": 6,
        "total": 3,
    }


WHOLE, SHORT, MORE = dict.fromkeys(ALL, 2), dict.fromkeys(REST, 2), dict.fromkeys(REST, 3)


def test_every_step_but_that_of_the_loss_has_its_units() -> None:
    rows = [commit(1, 1, SHORT), commit(2, 2, WHOLE), commit(3, 3, SHORT), commit(4, 4, MORE), commit(5, 5, WHOLE)]
    found = constancy(rows, 1)
    assert found == {"steps": 4, "wanted": 6, "away": 2, "at_loss": 4, "others": [], "back": True}
    assert constancy([*rows[:4], commit(5, 5, SHORT)], 1)["others"] == [5]
    assert constancy(rows[1:2], 1)["away"] == 0


def test_the_time_of_a_unit_is_that_of_a_step_by_the_micro_batches() -> None:
    rows = [commit(1, 1, MORE, step_s=1.5), commit(2, 2, SHORT), commit(3, 3, WHOLE, role="behind")]
    assert unit_seconds(rows, 0, ranks=1) == [0.5, 0.5]
    assert unit_seconds(rows[:1], 0, ranks=3) == [1.5]


def test_a_micro_batch_lasts_until_the_next_one_of_the_same_step() -> None:
    lines = [(1, "0-a-0", 0.0), (1, "0-a-0", 0.4), (2, "0-a-0", 5.0), (2, "0-a-0", 5.4), (2, "0-a-1", 9.0)]
    assert micro_batch_s({"step": s, "incarnation": i, "t": t} for s, i, t in lines) == pytest.approx(0.4)


def test_what_a_loss_costs_beyond_the_units_of_the_step() -> None:
    """Two micro-batches of 0.4 s and 0.2 s besides in a whole step; the step of the loss takes 1.5 s for three."""
    before = [commit(1, 1, WHOLE), commit(2, 2, WHOLE)]
    rows = {0: [*before, commit(3, 3.5, MORE, step_s=1.5)], 2: [*before, commit(3, 3.4, MORE, step_s=1.4)]}
    kill = Kill(2.5, 1, 0)
    assert beyond(kill, {**rows, 1: before}, 0.4, 1) == pytest.approx(0.1)
    late = {n: [*before, commit(3, 3, WHOLE), commit(4, 4.6, MORE, step_s=1.6)] for n in REST}
    assert beyond(kill, late, 0.4, 1) == pytest.approx(0.2)  # the step before was committed with the victim
    assert beyond(kill, {0: before, 2: rows[2]}, 0.4, 1) is None


@pytest.mark.proof
@pytest.mark.soak
def test_real_replicas_are_lost() -> None:
    """With small numbers: each step has its units, none is trained twice, and the replay has the same bits."""
    log = ProgressLog(io.StringIO())
    rows = bench.constant(log, away=2)
    assert [(row["others"], row["back"]) for row in rows] == [([], True)] * 4
    assert [row["at_loss"] for row in rows][2:] == [12, 12]
    (row,) = bench.kills(2, log, ["same_step"])
    assert (row["kills"], row["twice"], row["skipped"], row["replayed"], row["breaches"]) == (2, 0, 0, True, [])
