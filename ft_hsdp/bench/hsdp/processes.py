"""Where the replicas of a crew are: in namespaces of their own, or all on this machine's loopback.

The processes of one contender, each where its replica is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from ft_hsdp.bench.hsdp.scene import HsdpScene, HsdpSeat, config
from ft_hsdp.bench.scope import listening, spawn, spawn_worker
from ft_hsdp.bench.workers.link import WorkerLink, ask, collect
from ft_hsdp.bench.workers.team import LEAD_S
from ft_hsdp.config import dump
from ft_hsdp.launch.backend.processes import free_port, tied
from ft_hsdp.launch.run.directory import RunDir, write_job_files
from ft_hsdp.secret import TOKEN_VARIABLE

LOOPBACK = "127.0.0.1"
WORKER = "ft_hsdp.bench.hsdp.worker"


class CrewPlace(Protocol):
    """hub: where the lighthouse is; replicas: where each of them is; interface: between replicas."""

    hub: str
    replicas: tuple[str, ...]
    interface: str

    def host(self, replica: int | None = None) -> str:
        """The address of a replica; of the hub, if None."""

    def inside(self, space: str, *command: str) -> list[str]:
        """The command that does this at `hub` or at one of `replicas`."""

    def port(self, number: int, replica: int) -> int:
        """A port for the store of crew `number` at a replica: the same for the same place."""


class Loopback:
    """All on this machine, without a limit."""

    hub = ""
    interface = "lo"

    def __init__(self, replicas: int) -> None:
        self.replicas = ("",) * replicas
        self._ports: dict[tuple[int, int], int] = {}

    def host(self, replica: int | None = None) -> str:
        """Return the loopback address."""
        return LOOPBACK

    def inside(self, space: str, *command: str) -> list[str]:
        """Return the command unchanged: there are no namespaces."""
        return list(command)

    def port(self, number: int, replica: int) -> int:
        """One that was free when it was first asked for."""
        if (number, replica) not in self._ports:
            self._ports[number, replica] = free_port(LOOPBACK)
        return self._ports[number, replica]


START_S = 30.0  # longest time until the lighthouse listens
PRODUCT = "ft_hsdp"  # the crew that needs a lighthouse and state agents


class Crew:
    """`links` are the ranks, replica by replica."""

    def __init__(self, name: str, links: Sequence[WorkerLink]) -> None:
        self.name = name
        self._links = list(links)

    def ready(self) -> None:
        """Wait until all stand before their first step. Raises Retryable."""
        for link, answer in zip(self._links, collect(self._links), strict=True):
            link.greet(answer)

    def train(self, steps: int) -> float:
        """Seconds of a step: from a common start until the slowest rank could begin the next, over `steps`."""
        start = time.monotonic() + LEAD_S
        answers = ask(self._links, {"steps": steps, "at": start})
        return (max(answer["t"] for answer in answers) - start) / steps

    def cpu_s(self) -> float:
        """CPU time of all processes so far, the kernel's for them included."""
        times = [psutil.Process(link.pid).cpu_times() for link in self._links]
        return sum(t.user + t.system for t in times)


def start(
    name: str, kind: str, number: int, place: CrewPlace, scene: HsdpScene, folder: Path, stack: ExitStack
) -> Crew:
    """A crew's processes, all started; `stack` ends them. `folder` holds their configuration, run and logs."""
    run = RunDir(folder / "runs" / "link")
    links = []
    for replica in range(scene.replicas):
        host = place.host(replica)
        file = folder / f"{replica}.yaml"
        file.write_text(dump(config(scene, host, run.path.parent)))
        if kind == PRODUCT:
            _agent(replica, host, run, place, stack)
        for rank in range(scene.ranks):
            seat = HsdpSeat(
                kind,
                scene.replicas,
                scene.ranks,
                replica,
                rank,
                host,
                place.host(0),
                place.interface,
                place.port(number, 0 if kind == "hsdp" else replica),
                str(file),
                str(run.path),
                scene.waiting,
            )
            log = folder / f"{name.replace(' ', '-')}-{replica}-{rank}.log"
            within = partial(place.inside, place.replicas[replica])
            worker = f"{name} replica {replica} rank {rank}"
            links.append(spawn_worker(stack, worker, WORKER, [json.dumps(asdict(seat))], log, within))
    return Crew(name, links)


def lighthouse(place: CrewPlace, scene: HsdpScene, folder: Path, stack: ExitStack) -> RunDir:
    """Ft_hsdp's run in `folder`, and its lighthouse at the switch. Raises Retryable."""
    run = RunDir(folder / "runs" / "link")
    write_job_files(run, config(scene, place.host(), run.path.parent))
    command = place.inside(place.hub, *tied("lighthouse", "--run", str(run.path)))
    process = spawn(stack, command, run.lighthouse_log)
    listening(process, run.lighthouse, run.lighthouse_log, "the lighthouse")
    return run


def _agent(replica: int, host: str, run: RunDir, place: CrewPlace, stack: ExitStack) -> None:
    """The state agent of a replica, which waits for its ranks."""
    command = tied("ft_hsdp.state.agent.server", "--replica", str(replica), "--host", host)
    log = run.path.parent / f"agent-{replica}.log"
    token = run.token.read_text().strip()
    spawn(stack, place.inside(place.replicas[replica], *command), log, {TOKEN_VARIABLE: token})
