"""A step of a job under `submit` on a Ray cluster beside the same job's under `up`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ft_hsdp.bench.interval import times
from ft_hsdp.bench.overhead.cluster import Cluster
from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.recovery.herd import Herd
from ft_hsdp.bench.recovery.scene import Scene
from ft_hsdp.bench.roster import version
from ft_hsdp.bench.spread import spread
from ft_hsdp.launch.run.summary import fault_free_step

TURNS = 6
STEPS = 30  # of each turn
SCENE = Scene(replicas=3, ranks=2, wait_s=0.5)
JOB = "ft_hsdp.bench.overhead.ray_job"

Turn = Callable[[Scene, int], float]
"""Runs a job of the scene for so many steps; the median seconds of one."""


def ray(turns: int, log: Log, scene: Scene = SCENE, steps: int = STEPS) -> list[Row]:
    """A row. None, and a note, where Ray is not installed. Raises Retryable where a process fails.

    One job runs at a time, in the order ABBA, and the cluster beside its own job alone: its processes are a part
    of what Ray costs. A step waits most of its time, so that ranks leave the CPUs to whatever else there is.
    """
    if version("ray") is None:
        log.note("ray is left out: not installed")
        return []
    took: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(turns):
        for name in took if number % 2 == 0 else reversed(took):
            took[name].append(CONTENDERS[name](scene, steps))
            log.say(f"turn {number + 1} of {turns}, {name}: a step of {1e3 * took[name][-1]:.4g} ms")
    row: Row = {
        "replicas": scene.replicas,
        "ranks": scene.ranks,
        "rounds": turns,
        "steps": steps,
        "launchers": {name: spread(seconds) for name, seconds in took.items()},
        "times": {"ray": times(took["ray"], took["up"])},
    }
    found = row["times"]["ray"]
    log.say(
        f"a step under Ray takes {found['ratio']:.4g} times as long ({found['low']:.3f} to {found['high']:.3f})"
    )
    return [row]


def under_up(scene: Scene, steps: int) -> float:
    """As `launcher.py up` runs it."""
    with Herd(scene) as herd:
        return _watch(herd, steps)


def under_ray(scene: Scene, steps: int) -> float:
    """As `launcher.py submit` runs it."""
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster())
        herd = stack.enter_context(Herd(scene, (JOB, cluster.address), cluster.env))
        return _watch(herd, steps)


def _watch(herd: Herd, steps: int) -> float:
    herd.whole()
    begin = {replica: len(rows) for replica, rows in herd.rows.items()}
    herd.until(lambda: all(len(rows) >= begin[n] + steps for n, rows in herd.rows.items()), f"{steps} steps")
    return fault_free_step([row for n, rows in herd.rows.items() for row in rows[begin[n] :]])


CONTENDERS: Mapping[str, Turn] = {"up": under_up, "ray": under_ray}
