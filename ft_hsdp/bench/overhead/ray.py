"""A Ray cluster of this machine alone, as `ray start` makes it; it ends with the bench.

A step of a job under `submit` on a Ray cluster beside the same job's under `up`.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil

from ft_hsdp.analysis.goodput import fault_free_step
from ft_hsdp.bench.contenders.roster import version
from ft_hsdp.bench.options import ProgressLog, ResultRow
from ft_hsdp.bench.recovery.job_under_test import JobUnderTest
from ft_hsdp.bench.recovery.scene import RecoveryScene
from ft_hsdp.bench.results import ratio_interval, spread
from ft_hsdp.bench.scope import Scope, signals_held_back
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, free_port, last_line, tied

START_S = 60.0  # longest time until it runs
STOP_S = 30.0  # longest time for it to end
LEAVE_S = 2.0  # and for the processes below it to follow
STORE_BYTES = 80 << 20  # of its object store, the least: no rank uses it
STARTED = "Ray runtime started"


class BenchCluster(Scope):
    """A context: on entry a head node with all that Ray starts beside it, with a token; on exit nothing is left.

    address: for `submit`; env: what whoever connects needs in its environment.
    """

    prefix = "ray-"  # not longer: the path of a socket in the folder has at most 107 bytes

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.env: Mapping[str, str] = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def _begin(self, stack: ExitStack, folder: Path) -> None:
        command = [
            *tied("ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
            f"--port={self.address.rpartition(':')[2]}",
            f"--ray-client-server-port={free_port()}",
            f"--dashboard-port={free_port()}",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--object-store-memory={STORE_BYTES}",
            f"--temp-dir={folder}",
        ]
        log = folder / "start.log"
        with log.open("wb") as file, signals_held_back():
            self._process = subprocess.Popen(
                command,
                env={**environment(), **self.env, "TMPDIR": str(folder)},  # where its processes leave theirs
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
            stack.callback(self._end)
        deadline = time.monotonic() + START_S
        while STARTED not in log.read_text(errors="replace"):
            if self._process.poll() is not None:
                raise Retryable(f"bench: the Ray cluster ended: {last_line(log)}")
            if time.monotonic() > deadline:
                raise Retryable(f"bench: the Ray cluster does not run after {START_S:g} s: {last_line(log)}")
            time.sleep(0.05)

    def _end(self) -> None:
        """Have it end its processes; those that it leaves behind are killed."""
        below = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        _, left = psutil.wait_procs(below, LEAVE_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, LEAVE_S)


TURNS = 6
STEPS = 30  # of each turn
SCENE = RecoveryScene(replicas=3, ranks=2, wait_s=0.5)
JOB = "ft_hsdp.bench.overhead.ray_job"

Turn = Callable[[RecoveryScene, int], float]
"""Runs a job of the scene for so many steps; the median seconds of one."""


def ray(turns: int, log: ProgressLog, scene: RecoveryScene = SCENE, steps: int = STEPS) -> list[ResultRow]:
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
    row: ResultRow = {
        "replicas": scene.replicas,
        "ranks": scene.ranks,
        "rounds": turns,
        "steps": steps,
        "launchers": {name: spread(seconds) for name, seconds in took.items()},
        "times": {"ray": ratio_interval(took["ray"], took["up"])},
    }
    found = row["times"]["ray"]
    log.say(
        f"a step under Ray takes {found['ratio']:.4g} times as long ({found['low']:.3f} to {found['high']:.3f})"
    )
    return [row]


def under_up(scene: RecoveryScene, steps: int) -> float:
    """As `launcher.py up` runs it."""
    with JobUnderTest(scene) as job:
        return _watch(job, steps)


def under_ray(scene: RecoveryScene, steps: int) -> float:
    """As `launcher.py submit` runs it."""
    with ExitStack() as stack:
        cluster = stack.enter_context(BenchCluster())
        job = stack.enter_context(JobUnderTest(scene, (JOB, cluster.address), cluster.env))
        return _watch(job, steps)


def _watch(job: JobUnderTest, steps: int) -> float:
    job.whole()
    begin = {replica: len(rows) for replica, rows in job.rows.items()}
    job.until(lambda: all(len(rows) >= begin[n] + steps for n, rows in job.rows.items()), f"{steps} steps")
    return fault_free_step([row for n, rows in job.rows.items() for row in rows[begin[n] :]])


CONTENDERS: Mapping[str, Turn] = {"up": under_up, "ray": under_ray}
