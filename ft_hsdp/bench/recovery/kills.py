"""SIGKILL or SIGSTOP of random ranks at random moments, each time all replicas contribute; then the logs are read.

After a SIGSTOP the process and its connections stay, but it does nothing more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ft_hsdp.analysis.goodput import fault_free_step
from ft_hsdp.bench.options import ProgressLog, ResultRow
from ft_hsdp.bench.recovery.analysis import (
    PHASES,
    Kill,
    came_back,
    exposed,
    failures_of,
    phases,
    repeated,
    span,
    stall,
)
from ft_hsdp.bench.recovery.job_under_test import SEED, JobUnderTest, hunt
from ft_hsdp.bench.recovery.scene import RecoveryScene
from ft_hsdp.bench.results import milliseconds, ratio
from ft_hsdp.errors import Retryable

SAY_EVERY = 10
MOST = 50  # stops: each costs a second of silence, and a restart


def kills(scene: RecoveryScene, count: int, log: ProgressLog) -> list[ResultRow]:
    """SIGKILL random ranks; return a row: survivors' next commit, its phases, the return. Raises Retryable."""
    with JobUnderTest(scene) as job:
        made = _hit(job, count, log, job.kill, job.after)
    return [_told(job, made, "kills", log)]


def stops(scene: RecoveryScene, count: int, log: ProgressLog) -> list[ResultRow]:
    """SIGSTOP random ranks; return a row as for kills. Raises Retryable."""
    with JobUnderTest(scene) as job:

        def then(kill: Kill) -> None:
            job.after(kill)
            job.kill(kill.replica, kill.rank)  # so that a new one takes its place without waiting for its eviction

        made = _hit(job, count, log, job.stop, then)
    return [_told(job, made, "stops", log)]


def _hit(
    job: JobUnderTest,
    count: int,
    log: ProgressLog,
    hit: Callable[[int, int], Kill],
    then: Callable[[Kill], None],
) -> list[Kill]:
    made: list[Kill] = []
    for kill in hunt(job, count, random.Random(SEED), hit, then):
        made.append(kill)
        if len(made) % SAY_EVERY == 0:
            log.say(f"{len(made)} of {count} signals")
    return made


def _told(job: JobUnderTest, made: Sequence[Kill], what: str, log: ProgressLog) -> ResultRow:
    row = reckon(job.scene, made, job.rows, job.events)
    log.say(f"{len(made)} {what}: next commit less one step, p50 {row['less_one']['p50_ms']:.3g} ms")
    return row


def reckon(
    scene: RecoveryScene, made: Sequence[Kill], rows: dict[int, list[ResultRow]], events: Sequence[ResultRow]
) -> ResultRow:
    """The row for these kills. Raises Retryable where a survivor did not log what it did."""
    whole = [row for each in rows.values() for row in each if len(row["contributors"]) == scene.replicas]
    step_s = fault_free_step(row for each in rows.values() for row in each)
    failures = failures_of(rows, events)
    waiting_s = sum(map(exposed, whole)) / len(whole)
    stalls, parts, returns = [], [], []
    for kill in made:
        others = {replica: each for replica, each in rows.items() if replica != kill.replica}
        cost = stall(kill, others, step_s)
        if cost is None:
            raise Retryable(f"bench: a survivor of replica {kill.replica} did not log its next commit")
        stalls.append(cost)
        if (failure := failures.get(kill.incarnation)) is not None:
            parts.append(phases(kill, failure, cost.last, rows[cost.last], events))
            returns.append(came_back(kill, failure, others, waiting_s))
    back = [each for each in returns if each is not None]
    split = [each for each in parts if each is not None]
    again = [seconds for each in split if (seconds := repeated(each)) is not None]
    row: ResultRow = {
        "replicas": scene.replicas,
        "ranks": scene.ranks,
        "gradient_bytes_per_rank": 4 * scene.layers * scene.elements // scene.ranks,
        "kills": len(made),
        "step_ms": milliseconds(step_s),
        "next": span([cost.next_s for cost in stalls]),
        "less_one": span([cost.less_one_s for cost in stalls]),
        "stall": span([cost.stall_s for cost in stalls]),
        "phases": {name: span([each[name] for each in split]) for name in PHASES} if split else {},
        "rejoin": span([each.rejoin_s for each in back]) if back else None,
    }
    for name, times in {"repeat": again, "rejoin_wait": [each.waited_s for each in back]}.items():
        found = span(times) if times else None
        row[name] = found and {**found, "steps": ratio(found["p50_ms"], row["step_ms"])}
    return row
