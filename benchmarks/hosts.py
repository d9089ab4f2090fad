"""`bench hosts`: a machine of a replica is lost, and a spare one takes its place.

The machines are namespaces of this one, which needs root (`tests.support.machines`). Two replicas stand on two of
them each, and one is spare. Replica 1 loses one, which comes back afterwards as the next spare: its processes are
killed, or its link is cut first, so that nobody hears of their end.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import Namespace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from benchmarks.command import kills_of
from benchmarks.recovery import span
from benchmarks.results import ProgressLog, ResultRow, Verdicts, begin_result, finish_result, milliseconds, most
from tests.support.machines import Machine, Rig
from tests.support.machines_job import JobOnHosts

SEED, LOSSES, STEP_S = 1, 20, 0.07
BACK_MS = {"killed": 1500.0, "cut": 3000.0}  # the goals
WAIT_MS, WAIT_STEPS = {"killed": 0.0, "cut": 900.0}, 0.1


class Endless(JobOnHosts):
    step_count, step_s = 1_000_000, STEP_S


def options(args: Namespace) -> int:
    """Return how many machines `bench hosts` loses, each of both ways."""
    return kills_of(args, LOSSES)


def run(count: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``."""
    log = ProgressLog(stream)
    result, started = begin_result("hosts", log)
    with TemporaryDirectory() as folder, Rig(Path(folder), 6) as rig, Endless(rig, Path(folder), 2, 2) as job:
        result["hosts"] = losses(job, count, log)
    return finish_result(result, goals(result), log, started)


def goals(result: dict[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench hosts`."""
    for row in result["hosts"]:
        how, back_ms = row["how"], BACK_MS[row["how"]]
        wait_ms = WAIT_MS[how] + WAIT_STEPS * row["step_ms"]
        yield most(f"a machine is {how}: to the next contribution, p50 ms", row, back_ms, row["back"]["p50_ms"])
        yield most(f"{how}: the others' wait beyond a step, p50 ms", row, wait_ms, row["wait"]["p50_ms"])


def _is_spare(job: JobOnHosts, host: Machine) -> bool:
    return job.states().get(host) == "spare"


def losses(job: JobOnHosts, count: int, log: ProgressLog) -> list[ResultRow]:
    """Lose machines of replica 1, both ways in turns; return a row for each."""
    chance, found = random.Random(SEED), {how: list[tuple[float, float]]() for how in BACK_MS}
    steps: list[float] = []
    for number in range(count):
        for how, its in found.items():
            job.steps(10, "steps without a failure")
            times = [row["t"] for row in job.rows(0)[-8:]]
            steps.append(statistics.median(b - a for a, b in pairwise(times)))
            lost, starts, at = chance.choice(job.hosts(1)), len(job.starts(1)), time.time()
            job.lose(lost, cut=how == "cut")
            job.back(1, starts + 1)
            wait_s = next(row["t"] for row in job.rows(0) if row["t"] > at) - at - steps[-1]
            name = job.starts(1)[-1]["incarnation"]
            mine = (row for row in job.rows(1) if row["incarnation"] == name and 1 in row["contributors"])
            its.append((next(mine)["t"] - at, wait_s))
            log.say(f"{number + 1}, {how}: back after {its[-1][0]:.2f} s, the others waited {wait_s:.2f} s")
            lost.boot()
            job.join(lost)
            job.until(partial(_is_spare, job, lost), "it is a spare machine")
    step_ms = milliseconds(statistics.median(steps))
    return [
        {"how": how, "step_ms": step_ms, "back": span([b for b, _ in its]), "wait": span([w for _, w in its])}
        for how, its in found.items()
    ]
