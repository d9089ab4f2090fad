"""`bench strangers`: steps of a job of 3 x 2 whose listeners strangers call, and steps while they call a sink."""

from __future__ import annotations

import socket
from collections import Counter
from typing import Any, TextIO

import psutil

from ft_hsdp import handshake
from ft_hsdp.address import join, split
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.hostile import PER_S, Flood
from ft_hsdp.bench.recovery.job_under_test import JobUnderTest
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.results import MIB, ProgressLog, ratio_interval, spread
from ft_hsdp.bench.scope import listening, scratch, spawn
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.run.directory import read_json

SETUP = RecoverySetup(replicas=3, ranks=2, wait_s=0.03)
STEPS = 40  # of each window
PROBE_S = 0.5
LOCAL = {"@ftar-": "local ring doors", "@ft_hsdp/state/": "agents"}  # names of local sockets


def run(rounds: int, stream: TextIO, setup: RecoverySetup = SETUP, steps: int = STEPS) -> dict[str, Any]:
    """Return the result, ready for JSON: windows of steps with strangers at the job and at the sink, as ABBA.

    Raises:
        Retryable: The job fails.
    """
    log = ProgressLog(stream)
    result, started = begin_result("strangers", log)
    took: dict[str, list[float]] = {"sink": [], "job": []}
    calls: dict[str, int] = {"sink": 0, "job": 0}
    refused = 0
    with JobUnderTest(setup) as job, scratch() as (stack, folder):
        file, sink_log = folder / "sink.json", folder / "sink.log"
        process = spawn(stack, tied("ft_hsdp.bench.hostile", str(file)), sink_log)
        sink = listening(process, file, sink_log, "the sink")["address"]
        job.wait_for_all()
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
        job.wait_for_all()
        after, broken = _memory(job), len({row["epoch"] for row in job.rows[0]} - set(range(epoch + 1)))
    grown = {pid: after[pid] - before[pid] for pid in before.keys() & after.keys()}
    result["strangers"] = [
        {
            "replicas": setup.replicas,
            "ranks": setup.ranks,
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
    return finish_result(result, log, started)


def listeners(job: JobUnderTest) -> dict[str, str]:
    """Return where the job listens, and what kind each listener is.

    Torch's own listeners know no handshake and are left out. A replica's hub and store listen only until its ranks
    are there.
    """
    lighthouse = read_json(job.run.lighthouse)["url"].rpartition("/")[2]
    found = {lighthouse: "lighthouse"}
    for process in job.processes():
        agent = any("ft_hsdp.state.agent.server" in word for word in process.cmdline())
        for c in process.net_connections("tcp"):
            where = join(c.laddr.ip, c.laddr.port) if c.status == psutil.CONN_LISTEN else ""
            if where and where != lighthouse and _greets(where):
                found[where] = "state servers" if agent else "ring doors"
        for c in process.net_connections("unix"):
            name = str(c.laddr)
            for prefix, kind in LOCAL.items():
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
    """Return the seconds of each of the next steps of replica 0, while strangers call."""
    with Flood(targets) as flood:
        return job.window(steps), flood


def _memory(job: JobUnderTest) -> dict[int, int]:
    """Return the bytes that each process has for itself; the snapshots, which processes share, do not count."""
    return {process.pid: process.memory_info().rss - process.memory_info().shared for process in job.processes()}
