"""`bench memory`: what copies of states in host memory save when a host is lost.

- lost: one replica on two hosts, and a spare host. From the kill to the next new step, once with copies in memory
  and once with a checkpoint of each 50th step alone. A step is new when it was not committed before the kill;
- union: two replicas that lose a host each in the same moment.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TextIO

from benchmarks.command import kills_of, measures_of
from benchmarks.jobs import SEED, JobUnderTest, Setup
from benchmarks.results import (
    ProgressLog,
    ResultRow,
    Verdicts,
    begin_result,
    finish_result,
    least,
    milliseconds,
    most,
    ratio,
    spread,
)
from benchmarks.whole_job import WholeJob
from ft_hsdp.launch.injection import inject_by_hand, parse_options
from ft_hsdp.launch.run.directory import Row

MEASURES = ("lost", "union")
LOST_MS, LOST_TIMES, LOST_STEPS = 1500.0, 3.7, 1  # the goals

STEP_S = 0.1
CHECKPOINT_EVERY = 50
CALM = 6  # steps between two kills, at least
AT_STEP = 20  # at which two hosts are lost at once
PLACES: Mapping[str, Mapping[str, Any]] = {
    "memory": {"memory": {"copies": 2}},
    "checkpoint": {
        "memory": {"copies": 1},
        "checkpoint": {"every": CHECKPOINT_EVERY},
        "quorum": {"on_lost_head": "rollback"},
    },
}
AWAY_S = 0.5  # a lost host is back as a spare after that


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What `bench memory` measures."""

    measures: tuple[str, ...]
    kills: int  # lost hosts with copies in memory; fewer with checkpoints, and of two replicas at once


def options(args: Namespace) -> MemoryOptions:
    """Return what `bench memory` is to do."""
    return MemoryOptions(measures_of(args, MEASURES), kills_of(args, 20))


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench memory`."""
    for row in result["lost"]:
        found = row["places"]["memory"]
        yield most("host killed to new step - 1 step, p50 ms", row, LOST_MS, found["beyond"]["p50_ms"])
        yield least("from memory, times as fast as checkpoints", row, LOST_TIMES, row["times_as_fast"])
        yield most("steps lost with a host", row, LOST_STEPS, found["lost_steps"]["max"])
    for row in result["union"]:
        yield most("two hosts at once: steps lost", row, LOST_STEPS, row["lost_steps"])
        outside = sum(count for rung, count in row["rungs"].items() if rung in ("checkpoint", "initial"))
        yield most("two hosts at once: not from memory", row, 0, outside)


def run(options: MemoryOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    log, wanted = ProgressLog(stream), options.measures
    result, started = begin_result("memory", log)
    result["lost"] = lost(options.kills, log) if "lost" in wanted else []
    result["union"] = union(max(1, options.kills // 4), log) if "union" in wanted else []
    return finish_result(result, goals(result), log, started)


def setup_of(name: str, replicas: int = 1) -> Setup:
    """Return a job whose states are in the memory of several hosts, or in checkpoints: a name in `PLACES`."""
    hosts = {"per_replica": 2, "spare": 1} if replicas == 1 else {"per_replica": 2}
    sections = {"hosts": hosts, "debug": {"faults": True}, **PLACES[name]}
    return Setup(replicas=replicas, ranks=2, wait_s=STEP_S, sections=sections)


@dataclass(frozen=True, slots=True)
class Loss:
    """A host that was lost."""

    t: float  # Unix time
    step: int  # the newest committed one then
    new_s: float  # until the first step beyond it was committed
    first: int  # the first step that was committed after the kill

    @property
    def lost_steps(self) -> int:
        """How many committed steps were trained again."""
        return self.step + 1 - self.first


def loss(rows: Sequence[Row], t: float) -> Loss | None:
    """Return what a kill at ``t`` did to a replica, by its commits; None if no new step is committed yet."""
    before = [row for row in rows if row["t"] <= t]
    after = [row for row in rows if row["t"] > t]
    newest = max(row["step"] for row in before)
    # A commit that was under way when the host was lost is one of before: the next incarnation is what counts.
    again = [row for row in after if row["incarnation"] != before[-1]["incarnation"]]
    newest = max(newest, *(row["step"] for row in after if row["incarnation"] == before[-1]["incarnation"]), 0)
    new = next((row for row in again if row["step"] > newest), None)
    return None if new is None else Loss(t, newest, new["t"] - t, again[0]["step"])


def _kills(name: str, count: int, log: ProgressLog) -> tuple[list[Loss], float]:
    """Kill a random host of the only replica ``count`` times; return the losses, and the seconds of a step."""
    chance, found = random.Random(SEED), list[Loss]()
    apart = CHECKPOINT_EVERY if name == "checkpoint" else CALM
    with JobUnderTest(setup_of(name)) as job:
        rows = job.rows[0]

        def at(step: int) -> bool:
            return rows[-1]["step"] >= step

        def new(t: float) -> bool:
            return loss(rows, t) is not None

        for _ in range(count):
            job.wait_for_all()
            goal = rows[-1]["step"] + CALM + chance.randrange(apart)
            job.wait(partial(at, goal), f"step {goal}")
            time.sleep(chance.uniform(0, STEP_S))
            rank = chance.randrange(job.setup.ranks)
            event = inject_by_hand(job.run, parse_options(kind="host", replica=0, rank=rank, for_s=AWAY_S))
            job.wait(partial(new, event["t"]), "a new step")
            lost = loss(rows, event["t"])
            assert lost is not None
            found.append(lost)
            log.say(f"{name}: {lost.new_s:.2f} s to a new step, {lost.lost_steps} steps again")
        return found, job.step_s()


def lost(count: int, log: ProgressLog) -> list[ResultRow]:
    """Return a row: ``count`` lost hosts with copies in memory, fewer with checkpoints. Raises Retryable."""
    rows: dict[str, ResultRow] = {}
    for name in PLACES:
        found, step_s = _kills(name, count if name == "memory" else max(1, count // 4), log)
        rows[name] = {
            "kills": len(found),
            "step_ms": milliseconds(step_s),
            "new": spread([each.new_s for each in found]),
            "beyond": spread([max(0.0, each.new_s - step_s) for each in found]),
            "lost_steps": {
                "p50": statistics.median(each.lost_steps for each in found),
                "max": max(each.lost_steps for each in found),
            },
        }
    times = ratio(rows["checkpoint"]["new"]["p50_ms"], rows["memory"]["new"]["p50_ms"])
    log.say(f"a lost host: from memory {times:.3g} times as fast as from checkpoints")
    return [{"replicas": 1, "ranks": 2, "hosts": 2, "spare": 1, "places": rows, "times_as_fast": times}]


def union(count: int, log: ProgressLog) -> list[ResultRow]:
    """Return a row: two replicas lose a host each at once, ``count`` times. Raises Retryable."""
    rungs: Counter[str] = Counter()
    found: list[Loss] = []
    for number in range(count):
        hosts = [f"r{replica}h{(replica + number) % 2}" for replica in range(2)]  # of different ranks
        chaos = [
            {"kind": "host", "at_step": AT_STEP, "replicas": [replica], "host": host, "for_s": AWAY_S}
            for replica, host in enumerate(hosts)
        ]
        setup = setup_of("memory", replicas=2)
        sections = {**setup.sections, "chaos": chaos, "train": {"steps": 2 * AT_STEP, "threads": 1}}
        with WholeJob(replace(setup, sections=sections)) as job:
            summary = job.finish()
            hits = [event["t"] for event in job.events if event["event"] == "FailureInjected"]
            losses = [loss(rows, max(hits)) for rows in job.rows.values()]
        rungs.update(each["rung"] for each in summary["recoveries"] if each["number"])
        worst = max((each for each in losses if each is not None), key=lambda each: each.new_s)
        found.append(worst)
        log.say(f"two hosts at once: {worst.new_s:.2f} s to a new step, {worst.lost_steps} steps again")
    return [
        {
            "replicas": 2,
            "ranks": 2,
            "hosts": 2,
            "losses": count,
            "new": spread([each.new_s for each in found]),
            "lost_steps": max(each.lost_steps for each in found),
            "rungs": dict(sorted(rungs.items())),
        }
    ]
