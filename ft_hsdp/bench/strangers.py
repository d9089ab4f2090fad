"""`bench strangers`: steps of a job of 3 x 2 whose listeners strangers call, and steps while they call a sink."""

from __future__ import annotations

import socket
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

import psutil

from ft_hsdp import handshake
from ft_hsdp.address import join, split
from ft_hsdp.bench import tables
from ft_hsdp.bench.flood import PER_S, Flood
from ft_hsdp.bench.goals import GoalVerdict, begin_result, finish_result, most
from ft_hsdp.bench.options import ProgressLog
from ft_hsdp.bench.recovery.job_under_test import JobUnderTest
from ft_hsdp.bench.recovery.readers import processes
from ft_hsdp.bench.recovery.scene import RecoveryScene
from ft_hsdp.bench.results import ratio_interval, spread
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import environment, tied
from ft_hsdp.launch.run.directory import read_json

SCENE = RecoveryScene(replicas=3, ranks=2, wait_s=0.03)
STEPS = 40  # of each window
PROBE_S = 0.5
MIB = 1 << 20
RATIO, BROKEN, GROWTH_MIB = 1.10, 0, 32.0
LIGHTHOUSE = "lighthouse"


def run(rounds: int, stream: TextIO, scene: RecoveryScene = SCENE, steps: int = STEPS) -> dict[str, Any]:
    """The result, ready for JSON: windows of steps with strangers at the job and at the sink, in the order ABBA.

    Raises Retryable where the job fails.
    """
    log = ProgressLog(stream)
    result, started = begin_result("strangers", log)
    took: dict[str, list[float]] = {"sink": [], "job": []}
    calls: dict[str, int] = {"sink": 0, "job": 0}
    refused = 0
    with JobUnderTest(scene) as job, _sink() as sink:
        job.whole()
        targets = listeners(job)
        where = {"sink": [sink] * len(targets), "job": list(targets)}
        _window(job, where["job"], steps)  # what is made once, such as a first snapshot, does not count
        before, epoch = _memory(job), job.rows[0][-1]["epoch"]
        for number in range(rounds):
            for name in ("job", "sink") if number % 2 else ("sink", "job"):
                seconds, flood = _window(job, where[name], steps)
                took[name] += seconds
                calls[name] += flood.sent
                refused += flood.refused if name == "job" else 0
            log.say(f"round {number + 1} of {rounds}: {1e3 * took['job'][-1]:.4g} ms for a step")
        job.whole()
        after, broken = _memory(job), len({row["epoch"] for row in job.rows[0]} - set(range(epoch + 1)))
    grown = {pid: after[pid] - before[pid] for pid in before.keys() & after.keys()}
    result["strangers"] = [
        {
            "replicas": scene.replicas,
            "ranks": scene.ranks,
            "per_s": PER_S,
            "listeners": dict(Counter(targets.values())),
            "calls": calls,
            "refused": refused,
            "steps": {name: spread(seconds) for name, seconds in took.items()},
            "times": ratio_interval(took["job"], took["sink"]),
            "rings_broken": broken,
            "processes": len(grown),
            "processes_gone": len(before) - len(grown),
            "growth_mib": round(max(grown.values()) / MIB, 1),
        }
    ]
    return finish_result(result, verdicts(result["strangers"]), log, started)


def verdicts(rows: list[dict[str, Any]]) -> list[GoalVerdict]:
    """The goals beside what was seen."""
    found = []
    for row in rows:
        at = {"members": row["replicas"]}
        found.append(most("strangers at every listener: a step, times", at, RATIO, row["times"]["ratio"]))
        lost = row["rings_broken"] + row["processes_gone"]
        found.append(most("rings broken and processes lost meanwhile", at, BROKEN, lost))
        found.append(most("memory that a process grows by, MiB", at, GROWTH_MIB, row["growth_mib"]))
    return found


def show(result: Mapping[str, Any], stream: TextIO) -> None:
    """Print a result of `run`."""
    console = tables.begin_tables(result, stream)
    for row in result["strangers"]:
        doors = ", ".join(f"{count} {kind}" for kind, count in row["listeners"].items())
        console.print(f"  {row['per_s']} hostile first frames a second, in turn to {doors}")
        grid = tables.columns("a step", "strangers call", "p50, ms", "min", "max", "calls")
        for name, each in row["steps"].items():
            figures = (f"{each[key]:.4g}" for key in ("p50_ms", "min_ms", "max_ms"))
            grid.add_row({"sink": "an idle sink", "job": "the job"}[name], *figures, str(row["calls"][name]))
        console.print(grid)
        found = row["times"]
        console.print(f"  {found['ratio']:.3f} times as long ({found['low']:.3f} to {found['high']:.3f})")
    tables.end_tables(result, verdicts(result["strangers"]), console)


def listeners(job: JobUnderTest) -> dict[str, str]:
    """Where the job listens, and what kind each is. Torch's own listeners know no handshake and are left out; a
    replica's hub and store listen only until its ranks are there."""
    lighthouse = read_json(job.run.lighthouse)["url"].rpartition("/")[2]
    found = {lighthouse: LIGHTHOUSE}
    for process in processes(job):
        agent = any("ft_hsdp.state.agent.server" in word for word in process.cmdline())
        for c in process.net_connections("tcp"):
            where = join(c.laddr.ip, c.laddr.port) if c.status == psutil.CONN_LISTEN else ""
            if where and where != lighthouse and _greets(where):
                found[where] = "state servers" if agent else "ring doors"
        for c in process.net_connections("unix"):
            name = str(c.laddr)
            for prefix, kind in (("@ftar-", "local ring doors"), ("@ft_hsdp/state/", "agents")):
                if name.startswith(prefix):
                    found["\0" + name[1:]] = kind
    return found


def _greets(where: str) -> bool:
    try:
        with socket.create_connection(split(where), PROBE_S) as sock:
            return sock.recv(len(handshake.MAGIC)) == handshake.MAGIC
    except OSError:
        return False


def _window(job: JobUnderTest, targets: list[str], steps: int) -> tuple[list[float], Flood]:
    """Seconds of each of the next steps of replica 0 while strangers call."""
    with Flood(targets) as flood:
        return job.window(steps), flood


def _memory(job: JobUnderTest) -> dict[int, int]:
    """Bytes that each process has for itself; the snapshots, which processes share, do not count."""
    return {process.pid: process.memory_info().rss - process.memory_info().shared for process in processes(job)}


@contextmanager
def _sink() -> Iterator[str]:
    command = tied("ft_hsdp.bench.flood")
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            if not port:
                raise Retryable("bench: the sink did not start")
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
