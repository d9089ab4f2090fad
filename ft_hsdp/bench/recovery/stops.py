"""SIGSTOP of a random rank at a random moment: its process and its connections stay, but it does nothing more."""

from __future__ import annotations

import random
import time

from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.recovery.herd import SEED, Herd
from ft_hsdp.bench.recovery.kills import SAY_EVERY, reckon
from ft_hsdp.bench.recovery.reckon import Kill
from ft_hsdp.bench.recovery.scene import Scene

MOST = 50  # each costs a second of silence, and a restart


def stops(scene: Scene, count: int, log: Log) -> list[Row]:
    """A row: as for kills, of the survivors' next commit after a SIGSTOP. Raises Retryable."""
    chance = random.Random(SEED)
    made: list[Kill] = []
    with Herd(scene) as herd:
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
