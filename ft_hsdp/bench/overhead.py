"""`bench overhead`: what fault tolerance costs while nothing fails.

- steady: a step of ft_hsdp beside the same step of PyTorch's HSDP, which survives nothing;
- snapshot: a snapshot of each step beside none: of steps that compute, and that wait as beside an accelerator;
- ray: a step of a job under `submit` on a Ray cluster beside the same job's under `up`;
- link: what the exchange between replicas costs on a slow link (`bench.hsdp`).
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psutil

from ft_hsdp.analysis.goodput import fault_free_step
from ft_hsdp.bench import goals
from ft_hsdp.bench.contenders.base import version
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.hsdp.measure import measure as link
from ft_hsdp.bench.hsdp.processes import (
    PRODUCT,
    HsdpSetup,
    Loopback,
    TrainingProcesses,
    start,
    start_lighthouse,
)
from ft_hsdp.bench.options import measures_of, rounds_of
from ft_hsdp.bench.recovery.job_under_test import JobUnderTest
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.results import ProgressLog, ResultRow, interleave, ratio_interval, spread
from ft_hsdp.bench.scope import Process, Scope, scratch, spawn
from ft_hsdp.bench.workers.link import greet
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import free_port, last_line, tied
from ft_hsdp.launch.run.directory import RunDir

ROUNDS = {"steady": 70, "snapshot": 30, "ray": 6, "link": 20}  # where the user does not say
BY_DEFAULT = ("steady", "snapshot", "ray")
TRANSPORTS = ("tcp", "shm")
SETUP = HsdpSetup(
    sections={"train": {"micro_batch": 2, "seq_len": 128}, "model": {"dim": 192, "layers": 6, "heads": 6}}
)
SNAPSHOTS: Mapping[str, str] = {"without": "on_demand", "without again": "on_demand", "with": "every_step"}
SNAPSHOT_SETUPS: Mapping[str, HsdpSetup] = {"computing": SETUP, "waiting": replace(SETUP, waiting=(1 << 18, 0.5))}
RAY_SETUP = RecoverySetup(replicas=3, ranks=2, wait_s=0.5)
RAY_STEPS = 30  # of each turn
RAY_START_S = 60.0  # longest time until a cluster runs
RAY_STOP_S = 30.0  # longest time for it to end
RAY_LEAVE_S = 2.0  # and for the processes below it to follow
RAY_STORE_BYTES = 80 << 20  # of its object store, the least: no rank uses it
RAY_STARTED = "Ray runtime started"


def options(args: Namespace) -> Mapping[str, int]:
    """Return the rounds of each measure that is wanted."""
    wanted = measures_of(args, tuple(ROUNDS)) if args.measure else BY_DEFAULT
    return {name: rounds_of(args, ROUNDS[name]) for name in wanted}


def run(rounds: Mapping[str, int], stream: TextIO) -> dict[str, Any]:
    """Return the result of the measures in ``rounds``, ready for JSON. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("overhead", log)
    result["steady"] = steady(rounds["steady"], log) if "steady" in rounds else []
    result["snapshot"] = snapshot(rounds["snapshot"], log) if "snapshot" in rounds else []
    result["ray"] = ray(rounds["ray"], log) if "ray" in rounds else []
    result["link"] = link(HsdpSetup(rounds=rounds["link"]), log) if "link" in rounds else []
    return finish_result(result, goals.overhead(result), log, started)


@dataclass(frozen=True, slots=True)
class Trained:
    """One contender: its kind ("hsdp" or "ft_hsdp") and what it trains."""

    kind: str
    setup: HsdpSetup


def in_turns(
    contenders: Mapping[str, Trained],
    rounds: int,
    python: str = sys.executable,
    look: Callable[[str, RunDir], None] = lambda *_: None,
    settle_s: float = 0.0,
    lead: int = 0,
) -> dict[str, list[float]]:
    """Train all contenders on this machine, all alive, one block of one of them at a time (ABAB).

    Args:
        contenders: by name.
        rounds: how many blocks of each count.
        python: the interpreter of all processes.
        look: called for each contender of ft_hsdp after its last block, with its name and its run.
        settle_s: how long to wait after each block, for what it leaves to be done.
        lead: steps of each block before those that are timed, as in `TrainingProcesses.train`.

    Returns:
        Seconds of a step, of each of so many blocks, by contender.

    Raises:
        Retryable: A process fails.
    """
    with scratch() as (stack, folder):
        hosts = max(each.setup.replicas * each.setup.hosts for each in contenders.values())
        place = Loopback(hosts, python)
        samples: dict[str, Callable[[], float]] = {}
        seen: list[tuple[str, RunDir]] = []
        for number, (name, each) in enumerate(contenders.items()):
            own = folder / str(number)
            own.mkdir()
            run = start_lighthouse(place, each.setup, own, stack) if each.kind == PRODUCT else None
            processes = start(name, each.kind, number, place, each.setup, own, stack)
            if run is not None:
                seen.append((name, run))
            greet(processes.links)  # one after the other: two dozen imports at once take too long
            samples[name] = partial(_block, processes, each.setup.steps, settle_s, lead)
        took = interleave(samples, rounds)
        for one in seen:
            look(*one)
        return took


def _block(processes: TrainingProcesses, steps: int, settle_s: float, lead: int) -> float:
    seconds = processes.train(steps, lead)
    time.sleep(settle_s)
    return seconds


def _compared(took: Mapping[str, list[float]], anchor: str) -> dict[str, dict[str, float]]:
    """Return how many times as long as the anchor's each other contender's step takes."""
    return {name: ratio_interval(seconds, took[anchor]) for name, seconds in took.items() if name != anchor}


def steady(
    rounds: int,
    log: ProgressLog,
    setup: HsdpSetup = SETUP,
    transports: tuple[str, ...] = TRANSPORTS,
    python: str = sys.executable,
) -> list[ResultRow]:
    """Return a row: steps of HSDP, of a second HSDP (the method's own noise), of ft_hsdp over each transport.

    Between machines ft_hsdp uses TCP, as HSDP's gloo always does. Raises Retryable where a process fails.
    """
    contenders = {"hsdp": Trained("hsdp", setup), "hsdp again": Trained("hsdp", setup)}
    for transport in transports:
        sections = {**setup.sections, "ftar": {"transport": transport}}
        contenders[f"ft_hsdp, {transport}"] = Trained(PRODUCT, replace(setup, sections=sections))
    took = in_turns(contenders, rounds, python)
    row: ResultRow = {
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "rounds": rounds,
        "crews": {name: spread(seconds) for name, seconds in took.items()},
        "times": _compared(took, "hsdp"),
    }
    for name, found in row["times"].items():
        log.say(f"{name}: {found['ratio']:.3f} times HSDP's step ({found['low']:.3f} to {found['high']:.3f})")
    return [row]


def snapshot(rounds: int, log: ProgressLog, setups: Mapping[str, HsdpSetup] = SNAPSHOT_SETUPS) -> list[ResultRow]:
    """Return a row for each kind of step. Raises Retryable where a process fails."""
    rows = []
    for kind, setup in setups.items():
        contenders = {
            name: Trained(PRODUCT, replace(setup, sections={**setup.sections, "state": {"snapshot": mode}}))
            for name, mode in SNAPSHOTS.items()
        }
        took = in_turns(contenders, rounds)
        row: ResultRow = {
            "step": kind,
            "replicas": setup.replicas,
            "ranks": setup.ranks,
            "rounds": rounds,
            "modes": {name: spread(seconds) for name, seconds in took.items()},
            "times": _compared(took, "without"),
        }
        rows.append(row)
        log.say(f"{kind}: a snapshot each step makes it {row['times']['with']['ratio']:.3f} times as long")
    return rows


def ray(turns: int, log: ProgressLog, setup: RecoverySetup = RAY_SETUP, steps: int = RAY_STEPS) -> list[ResultRow]:
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


def under_up(setup: RecoverySetup, steps: int) -> float:
    """Run a job as `launcher.py up` does; return the median seconds of a step, over so many."""
    with JobUnderTest(setup) as job:
        return _step_s(job, steps)


def under_ray(setup: RecoverySetup, steps: int) -> float:
    """Run a job as `launcher.py submit` does; return the median seconds of a step, over so many."""
    with ExitStack() as stack:
        cluster = stack.enter_context(BenchCluster())
        return _step_s(stack.enter_context(JobUnderTest(setup, (cluster.address,), cluster.env)), steps)


def _step_s(job: JobUnderTest, steps: int) -> float:
    job.wait_for_all()
    begin = {replica: len(rows) for replica, rows in job.rows.items()}
    job.wait(lambda: all(len(rows) >= begin[n] + steps for n, rows in job.rows.items()), f"{steps} steps")
    return fault_free_step([row for n, rows in job.rows.items() for row in rows[begin[n] :]])


LAUNCHERS: Mapping[str, Callable[[RecoverySetup, int], float]] = {"up": under_up, "ray": under_ray}


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
