"""torchft's Manager in the same situation, at its defaults and tuned."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping

from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.recovery.flock import Flock, Setting
from ft_hsdp.bench.recovery.herd import SEED
from ft_hsdp.bench.recovery.reckon import Kill, stall
from ft_hsdp.bench.recovery.scene import Scene
from ft_hsdp.bench.recovery.spans import span
from ft_hsdp.bench.roster import version
from ft_hsdp.bench.spread import milliseconds

TUNED = (1000, 100)
KILLED: Mapping[str, Setting] = {
    "defaults": Setting((), "heartbeat_timeout 5 s, join_timeout 60 s", 3),
    "tuned": Setting(TUNED, "heartbeat_timeout 1 s, join_timeout 0.1 s", 10),
}

STOPPED: Mapping[str, Setting] = {
    "defaults": Setting((), "timeout 60 s, heartbeat_timeout 5 s, join_timeout 60 s", 2),
    "tuned": Setting(TUNED, "timeout 2 s, heartbeat_timeout 1 s, join_timeout 0.1 s", 10, 2.0),
}


def installed(log: Log) -> bool:
    """Whether torchft is; a note if it is not."""
    if version("torchft") is None:
        log.note("torchft is left out: not installed")
        return False
    return True


def peer(
    scene: Scene,
    most: int,
    log: Log,
    settings: Mapping[str, Setting],
    number: signal.Signals,
) -> list[Row]:
    """A row for each of `settings`, with at most `most` signals; none, and a note, where it is not installed."""
    if not installed(log):
        return []
    rows = []
    for name, setting in settings.items():
        with Flock(scene, setting) as flock:
            found = _hunt(flock, min(most, setting.kills), number)
            rows.append({"setting": name, "text": setting.text, **found})
        p50_ms = rows[-1]["less_one"]["p50_ms"]
        log.say(f"torchft, {name}, {number.name}: next commit less one step, p50 {p50_ms:.4g} ms")
    return rows


def _hunt(flock: Flock, count: int, number: signal.Signals) -> Row:
    chance = random.Random(SEED)
    everybody = flock.scene.replicas
    made: list[Kill] = []
    for _ in range(count):
        flock.whole()
        time.sleep(chance.uniform(0, flock.scene.wait_s))
        made.append(flock.hit(chance.randrange(everybody), number))
        flock.without(made[-1])
        flock.start(made[-1].replica)
    rows = flock.rows
    step_s = flock.step_s()
    found = []
    for kill in made:
        others = {n: each for n, each in rows.items() if n != kill.replica}
        cost = stall(kill, others, lambda row: row["participants"] < everybody, step_s)
        if cost is not None:
            found.append(cost)
    return {
        "replicas": everybody,
        "kills": len(made),
        "step_ms": milliseconds(step_s),
        "next": span([cost.next_s for cost in found]),
        "less_one": span([cost.less_one_s for cost in found]),
        "stall": span([cost.stall_s for cost in found]),
    }
