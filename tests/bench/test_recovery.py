from __future__ import annotations

import io
import os
import signal
from typing import Any

import pytest

from benchmarks import recovery
from benchmarks.jobs import Kill, Setting, Setup
from benchmarks.recovery import RecoveryOptions, costs, run, stall, stalls, torchft
from benchmarks.results import ProgressLog
from tests.support.bench.tables import shown

SMALL = Setup(replicas=2, layers=1, elements=256, wait_s=0.02)


def commit(t: float, step: int, contributors: list[int]) -> dict[str, Any]:
    whole = {"t": t, "step": step, "contributors": contributors, "total": 3, "step_s": 1.0}
    return {**whole, "role": "contribute"}


KILL = Kill(12.25, 2, 0)
WHOLE = [0, 1, 2]
ROWS = {
    0: [commit(11, 1, WHOLE), commit(12, 2, WHOLE), commit(13.5, 3, [0, 1]), commit(14.5, 4, [0, 1])],
    1: [commit(11, 1, WHOLE), commit(12, 2, WHOLE), commit(13.6, 3, [0, 1]), commit(14.5, 4, [0, 1])],
    2: [commit(11, 1, WHOLE), commit(12, 2, WHOLE)],
}


def others(rows: dict[int, list[dict[str, Any]]] = ROWS) -> dict[int, list[dict[str, Any]]]:
    return {0: rows[0], 1: rows[1]}


def test_a_stall_is_that_of_the_last_survivor() -> None:
    found = stall(KILL, others(), 1.0)
    assert found is not None
    assert (found.next_s, found.less_one_s) == pytest.approx((1.35, 0.35))
    assert found.stall_s == pytest.approx(0.6)  # of a step that began at 12


def test_a_step_that_was_committed_with_the_victim_is_not_the_next_one() -> None:
    rows = {0: [*ROWS[0][:2], commit(12.3, 3, WHOLE), commit(14.3, 4, [0, 1])]}
    found = stall(KILL, rows, 1.0)
    assert found is not None
    assert (found.next_s, found.stall_s) == pytest.approx((2.05, 0.3))  # two steps in 2.3 s
    assert stall(KILL, {0: ROWS[0][:2]}, 1.0) is None


def test_a_row_and_its_goals_and_tables() -> None:
    row = {"replicas": 3, **costs(stalls([KILL], ROWS, 1.0), 1.0)}
    assert row["step_ms"] == 1000
    result: dict[str, Any] = {
        "kill": [row],
        "torchft": [{"setting": "tuned", "signal": "SIGKILL", **row}],
        "stop": [row],
    }
    assert {verdict.text: (verdict.seen, verdict.met) for verdict in recovery.goals(result)} == {
        "SIGKILL to next commit - 1 step, p50 ms": (350, False),
        "SIGKILL to next commit - 1 step, p99 ms": (350, False),
        "all of the step hit - 1 step, p50 ms": (600, False),
        "all of the step hit - 1 step, p99 ms": (600, False),
        "SIGSTOP to next commit - 1 step, p50 ms": (350, True),
        "SIGSTOP to next commit - 1 step, p99 ms": (350, True),
    }
    text = shown(result, recovery.goals(result))
    assert "\ntorchft:\nsetting: tuned\n" in text


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_replica_is_killed() -> None:
    with open(os.devnull, "w") as nowhere:
        result = run(RecoveryOptions(("kill",), 1), nowhere, SMALL)
    (row,) = result["kill"]
    assert (row["kills"], row["replicas"]) == (1, 2)
    assert row["next"]["p50_ms"] > 0
    assert result["goals"]
    assert result["torchft"] == result["stop"] == []


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_torchft_in_the_same_situation() -> None:
    settings = {signal.SIGKILL: {"quick": Setting((300, 100), "quick", 10, 2.0)}}
    (row,) = torchft(SMALL, 1, ProgressLog(io.StringIO()), signal.SIGKILL, settings)
    assert (row["kills"], row["next"]["count"], row["signal"]) == (1, 1, "SIGKILL")
    assert row["next"]["p50_ms"] > 200  # it waits for a heartbeat that does not come
