"""`bench snapshot`: a step with a snapshot of each state beside one without, of ft_hsdp; in turns."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TextIO

from ft_hsdp.bench.command import rounds_of
from ft_hsdp.bench.jobs import PRODUCT, WAITING, Setup
from ft_hsdp.bench.overhead import SETUP, compared, in_turns
from ft_hsdp.bench.results import ProgressLog, ResultRow, Row, Verdicts, begin_result, finish_result, most, spread

SNAPSHOTS: Mapping[str, str] = {"without": "on_demand", "without again": "on_demand", "with": "every_step"}
SETUPS: Mapping[str, Setup] = {
    "computing": SETUP,
    "waiting": replace(SETUP, model=WAITING, layers=6, elements=1 << 18, wait_s=0.5),
}
GOALS = {"computing": 1.10, "waiting": 1.02}


def options(args: Namespace) -> int:
    """Return how many blocks of steps of each kind `bench snapshot` takes."""
    return rounds_of(args, 30)


def goals(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench snapshot`."""
    for row in result["snapshot"]:
        text = f"snapshot each step, {row['step']}: times as long"
        yield most(text, row, GOALS[row["step"]], row["times"]["with"]["ratio"])


def run(rounds: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("snapshot", log)
    result["snapshot"] = snapshots(rounds, log)
    return finish_result(result, goals(result), log, started)


def snapshots(rounds: int, log: ProgressLog, setups: Mapping[str, Setup] = SETUPS) -> list[ResultRow]:
    """Return a row for each kind of step. Raises Retryable where a process fails."""
    rows = []
    for kind, setup in setups.items():
        contenders = {
            name: (PRODUCT, replace(setup, sections={**setup.sections, "state": {"snapshot": mode}}))
            for name, mode in SNAPSHOTS.items()
        }
        took = in_turns(contenders, rounds)
        row: ResultRow = {
            "step": kind,
            "replicas": setup.replicas,
            "ranks": setup.ranks,
            "rounds": rounds,
            "modes": {name: spread(seconds) for name, seconds in took.items()},
            "times": compared(took, "without"),
        }
        rows.append(row)
        log.say(f"{kind}: a snapshot each step makes it {row['times']['with']['ratio']:.3f} times as long")
    return rows
