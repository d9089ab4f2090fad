"""The processes of one contender, each where its replica is."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil

from ft_hsdp.bench.hsdp.setup import PRODUCT, HsdpSetup, Loopback, RankSpec, job_config
from ft_hsdp.bench.scope import listening, spawn
from ft_hsdp.bench.workers.link import WorkerLink, ask, spawn_worker
from ft_hsdp.bench.workers.rings import LEAD_S
from ft_hsdp.config import dump
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.run.directory import RunDir, write_job_files
from ft_hsdp.secret import TOKEN_VARIABLE

WORKER = "ft_hsdp.bench.hsdp.worker"


class TrainingProcesses:
    """All ranks of one contender."""

    def __init__(self, name: str, links: Sequence[WorkerLink]) -> None:
        self.name = name
        self.links = list(links)  # replica by replica

    def train(self, steps: int) -> float:
        """Train so many steps.

        Returns:
            Seconds of a step: from a common start until the slowest rank could begin the next, over ``steps``.
        """
        start = time.monotonic() + LEAD_S
        answers = ask(self.links, {"steps": steps, "at": start})
        return (max(answer["t"] for answer in answers) - start) / steps

    def cpu_s(self) -> float:
        """Return the CPU time of all processes so far, the kernel's for them included."""
        times = [psutil.Process(link.pid).cpu_times() for link in self.links]
        return sum(t.user + t.system for t in times)


def start(
    name: str, kind: str, number: int, place: Loopback, setup: HsdpSetup, folder: Path, stack: ExitStack
) -> TrainingProcesses:
    """Start a contender's processes.

    Args:
        name: of the contender.
        kind: alone, hsdp or ft_hsdp.
        number: tells contenders apart that run side by side.
        place: where the replicas are.
        setup: what is trained.
        folder: takes the configuration, the run and the logs.
        stack: what ends the processes.
    """
    run = RunDir(folder / "runs" / "link")
    links = []
    for replica in range(setup.replicas):
        host = place.host(replica)
        file = folder / f"{replica}.yaml"
        file.write_text(dump(job_config(setup, host, run.path.parent)))
        if kind == PRODUCT:
            _start_agent(replica, host, run, place, stack)
        for rank in range(setup.ranks):
            spec = RankSpec(
                kind,
                setup.replicas,
                setup.ranks,
                replica,
                rank,
                host,
                place.host(0),
                place.interface,
                place.port(number, 0 if kind == "hsdp" else replica),
                str(file),
                str(run.path),
                setup.waiting,
            )
            log = folder / f"{name.replace(' ', '-')}-{replica}-{rank}.log"
            within = partial(place.inside, place.replicas[replica])
            worker = f"{name} replica {replica} rank {rank}"
            links.append(spawn_worker(stack, worker, WORKER, [json.dumps(asdict(spec))], log, within=within))
    return TrainingProcesses(name, links)


def start_lighthouse(place: Loopback, setup: HsdpSetup, folder: Path, stack: ExitStack) -> RunDir:
    """Make ft_hsdp's run in ``folder`` and start its lighthouse at the hub; return the run. Raises Retryable."""
    run = RunDir(folder / "runs" / "link")
    write_job_files(run, job_config(setup, place.host(), run.path.parent))
    command = place.inside(place.hub, *tied("lighthouse", "--run", str(run.path)))
    process = spawn(stack, command, run.lighthouse_log)
    listening(process, run.lighthouse, run.lighthouse_log, "the lighthouse")
    return run


def _start_agent(replica: int, host: str, run: RunDir, place: Loopback, stack: ExitStack) -> None:
    """Start the state agent of a replica, which waits for its ranks."""
    command = tied("ft_hsdp.state.agent.server", "--replica", str(replica), "--host", host)
    log = run.path.parent / f"agent-{replica}.log"
    token = run.token.read_text().strip()
    spawn(stack, place.inside(place.replicas[replica], *command), log, {TOKEN_VARIABLE: token})
