"""`bench ray`: a step of a job under `submit` on a Ray cluster beside the same job's under `up`."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import psutil

from ft_hsdp.analysis.goodput import fault_free_step
from ft_hsdp.bench.command import rounds_of
from ft_hsdp.bench.jobs import JobUnderTest, Setup
from ft_hsdp.bench.processes import Process, Scope, spawn
from ft_hsdp.bench.results import (
    ProgressLog,
    ResultRow,
    Verdicts,
    begin_result,
    finish_result,
    most,
    ratio_interval,
    spread,
    version,
)
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import free_port, last_line, tied

TURNS = 6  # of each launcher, where the user does not say
RAY = 1.02  # the goal
RAY_SETUP = Setup(replicas=3, ranks=2, wait_s=0.5)
RAY_STEPS = 30  # of each turn
RAY_START_S = 60.0  # longest time until a cluster runs
RAY_STOP_S = 30.0  # longest time for it to end
RAY_LEAVE_S = 2.0  # and for the processes below it to follow
RAY_STORE_BYTES = 80 << 20  # of its object store, the least: no rank uses it
RAY_STARTED = "Ray runtime started"


def options(args: Namespace) -> int:
    """Return how many jobs `bench ray` runs under each launcher."""
    return rounds_of(args, TURNS)


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench ray`."""
    for row in result["ray"]:
        yield most("under Ray: a step, times that under up", row, RAY, row["times"]["ray"]["ratio"])


def run(turns: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("ray", log)
    result["ray"] = ray(turns, log)
    return finish_result(result, goals(result), log, started)


def ray(turns: int, log: ProgressLog, setup: Setup = RAY_SETUP, steps: int = RAY_STEPS) -> list[ResultRow]:
    """Return a row; none, and a note, where Ray is not installed. Raises Retryable where a process fails.

    One job runs at a time, in the order ABBA, and the cluster beside its own job alone: its processes are a part
    of what Ray costs. A step waits most of its time, so that ranks leave the CPUs to whatever else there is.
    """
    if version("ray") is None:
        log.note("ray is left out: not installed")
        return []
    took: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    for number in range(turns):
        for name in took if number % 2 == 0 else reversed(took):
            took[name].append(LAUNCHERS[name](setup, steps))
            log.say(f"turn {number + 1} of {turns}, {name}: a step of {1e3 * took[name][-1]:.4g} ms")
    found = ratio_interval(took["ray"], took["up"])
    log.say(
        f"a step under Ray takes {found['ratio']:.4g} times as long ({found['low']:.3f} to {found['high']:.3f})"
    )
    return [
        {
            "replicas": setup.replicas,
            "ranks": setup.ranks,
            "rounds": turns,
            "steps": steps,
            "launchers": {name: spread(seconds) for name, seconds in took.items()},
            "times": {"ray": found},
        }
    ]


def under_up(setup: Setup, steps: int) -> float:
    """Run a job as `launcher.py up` does; return the median seconds of a step, over so many."""
    with JobUnderTest(setup) as job:
        return _step_s(job, steps)


def under_ray(setup: Setup, steps: int) -> float:
    """Run a job as `launcher.py submit` does; return the median seconds of a step, over so many."""
    with ExitStack() as stack:
        cluster = stack.enter_context(BenchCluster())
        return _step_s(
            stack.enter_context(JobUnderTest(setup, ("submit", "--ray-address", cluster.address), cluster.env)),
            steps,
        )


def _step_s(job: JobUnderTest, steps: int) -> float:
    job.wait_for_all()
    begin = {replica: len(rows) for replica, rows in job.rows.items()}
    job.wait(lambda: all(len(rows) >= begin[n] + steps for n, rows in job.rows.items()), f"{steps} steps")
    return fault_free_step([row for n, rows in job.rows.items() for row in rows[begin[n] :]])


LAUNCHERS: Mapping[str, Callable[[Setup, int], float]] = {"up": under_up, "ray": under_ray}


class BenchCluster(Scope):
    """A context: on entry a Ray head node of this machine alone, as `ray start` makes it, with a token.

    On exit nothing is left of it.
    """

    prefix = "ray-"  # not longer: the path of a socket in the folder has at most 107 bytes

    def __init__(self, python: str = sys.executable) -> None:
        """Prepare a cluster; ``python``: the interpreter of all its processes."""
        self._python = python
        self.address = f"127.0.0.1:{free_port()}"  # for `submit`
        # What a process that connects needs in its environment.
        self.env: Mapping[str, str] = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def _begin(self, folder: Path) -> None:
        command = [
            self._python,
            *tied("ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats")[1:],
            f"--port={self.address.rpartition(':')[2]}",
            f"--ray-client-server-port={free_port()}",
            f"--dashboard-port={free_port()}",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--object-store-memory={RAY_STORE_BYTES}",
            f"--temp-dir={folder}",
        ]
        log = folder / "start.log"
        env = {**self.env, "TMPDIR": str(folder)}  # where its processes leave theirs
        process = spawn(self.stack, command, log, env, end=_end_cluster)
        deadline = time.monotonic() + RAY_START_S
        while RAY_STARTED not in log.read_text(errors="replace"):
            if process.poll() is not None:
                raise Retryable(f"bench: the Ray cluster ended: {last_line(log)}")
            if time.monotonic() > deadline:
                raise Retryable(f"bench: the Ray cluster does not run after {RAY_START_S:g} s: {last_line(log)}")
            time.sleep(0.05)


def _end_cluster(process: Process) -> None:
    """Have a cluster end its processes; kill those that it leaves behind."""
    below = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(RAY_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    _, left = psutil.wait_procs(below, RAY_LEAVE_S)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, RAY_LEAVE_S)
