"""SIGKILL of a random rank at a random moment, each time all replicas contribute; then the logs are read."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.recovery.herd import SEED, Herd
from ft_hsdp.bench.recovery.reckon import PHASES, Kill, came_back, exposed, phases, repeated, stall
from ft_hsdp.bench.recovery.scene import Scene
from ft_hsdp.bench.recovery.spans import span
from ft_hsdp.bench.spread import milliseconds, ratio
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.run.summary import fault_free_step

SAY_EVERY = 10


def kills(scene: Scene, count: int, log: Log) -> list[Row]:
    """A row: the survivors' next commit, its phases, the repeated reduction, the return. Raises Retryable."""
    with Herd(scene) as herd:
        herd.whole()
        made = _hunt(herd, count, log)
        herd.whole()
    row = reckon(scene, made, herd.rows, herd.events)
    log.say(f"{count} kills: next commit less one step, p50 {row['less_one']['p50_ms']:.3g} ms")
    return [row]


def _hunt(herd: Herd, count: int, log: Log) -> list[Kill]:
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


def reckon(scene: Scene, made: Sequence[Kill], rows: dict[int, list[Row]], events: Sequence[Row]) -> Row:
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
    row: Row = {
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
