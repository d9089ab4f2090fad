"""SIGKILL of a random rank at a random moment, each time all replicas contribute; then the logs are read.

SIGSTOP of a random rank at a random moment: its process and its connections stay, but it does nothing more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from ft_hsdp.analysis.goodput import fault_free_step
from ft_hsdp.bench.options import ProgressLog, ResultRow
from ft_hsdp.bench.recovery.analysis import PHASES, Kill, came_back, exposed, phases, repeated, span, stall
from ft_hsdp.bench.recovery.job_under_test import SEED, JobUnderTest
from ft_hsdp.bench.recovery.scene import RecoveryScene
from ft_hsdp.bench.results import milliseconds, ratio
from ft_hsdp.errors import Retryable

SAY_EVERY = 10


def kills(scene: RecoveryScene, count: int, log: ProgressLog) -> list[ResultRow]:
    """A row: the survivors' next commit, its phases, the repeated reduction, the return. Raises Retryable."""
    with JobUnderTest(scene) as herd:
        herd.whole()
        made = _hunt(herd, count, log)
        herd.whole()
    row = reckon(scene, made, herd.rows, herd.events)
    log.say(f"{count} kills: next commit less one step, p50 {row['less_one']['p50_ms']:.3g} ms")
    return [row]


def _hunt(herd: JobUnderTest, count: int, log: ProgressLog) -> list[Kill]:
    chance = random.Random(SEED)
    made: list[Kill] = []
    for number in range(count):
        herd.whole()
        time.sleep(chance.uniform(0, herd.rows[0][-1]["step_s"]))  # at any moment of a step
        victim = chance.randrange(herd.scene.replicas)
        made.append(herd.kill(victim, chance.randrange(herd.scene.ranks)))
        herd.after(made[-1], [replica for replica in herd.rows if replica != victim])
        if (number + 1) % SAY_EVERY == 0:
            log.say(f"{number + 1} of {count} kills")
    return made


def reckon(
    scene: RecoveryScene, made: Sequence[Kill], rows: dict[int, list[ResultRow]], events: Sequence[ResultRow]
) -> ResultRow:
    """The row for these kills. Raises Retryable where a survivor did not log what it did."""
    whole = [row for each in rows.values() for row in each if len(row["contributors"]) == scene.replicas]
    step_s = fault_free_step([row for each in rows.values() for row in each])
    waiting_s = sum(map(exposed, whole)) / len(whole)
    stalls, parts, returns = [], [], []
    for kill in made:
        others = {replica: each for replica, each in rows.items() if replica != kill.replica}
        cost = stall(kill, others, lambda row, kill=kill: kill.replica not in row["contributors"], step_s)  # type: ignore[misc]
        if cost is None:
            raise Retryable(f"bench: a survivor of replica {kill.replica} did not log its next commit")
        stalls.append(cost)
        parts.append(phases(kill, cost.last, rows[cost.last], events))
        returns.append(came_back(kill, others, events, waiting_s))
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


MOST = 50  # each costs a second of silence, and a restart


def stops(scene: RecoveryScene, count: int, log: ProgressLog) -> list[ResultRow]:
    """A row: as for kills, of the survivors' next commit after a SIGSTOP. Raises Retryable."""
    chance = random.Random(SEED)
    made: list[Kill] = []
    with JobUnderTest(scene) as herd:
        for number in range(count):
            herd.whole()
            time.sleep(chance.uniform(0, herd.rows[0][-1]["step_s"]))
            victim, rank = chance.randrange(scene.replicas), chance.randrange(scene.ranks)
            made.append(herd.stop(victim, rank))
            herd.after(made[-1], [replica for replica in herd.rows if replica != victim])
            herd.kill(victim, rank)  # so that a new one takes its place without waiting for its eviction
            if (number + 1) % SAY_EVERY == 0:
                log.say(f"{number + 1} of {count} stops")
        herd.whole()
    row = reckon(scene, made, herd.rows, herd.events)
    log.say(f"{count} stops: next commit less one step, p50 {row['less_one']['p50_ms']:.3g} ms")
    return [row]
