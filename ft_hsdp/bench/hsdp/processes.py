"""What is trained beside PyTorch's HSDP, and the processes of one contender, each where its replica is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from ft_hsdp.bench.scope import listening, spawn
from ft_hsdp.bench.workers.link import WorkerLink, ask, spawn_worker
from ft_hsdp.bench.workers.rings import LEAD_S
from ft_hsdp.config import Config, dump, parse
from ft_hsdp.launch.backend.processes import free_port, tied
from ft_hsdp.launch.run.directory import RunDir, write_job_files
from ft_hsdp.secret import TOKEN_VARIABLE

Sections = Mapping[str, Mapping[str, Any]]
ENDLESS = 10**6  # steps: the processes are killed when the bench has enough
PATIENCE_S = 120.0  # longest silence of anything
LOOPBACK = "127.0.0.1"
PRODUCT = "ft_hsdp"  # the kind that needs a lighthouse and state agents


@dataclass(frozen=True, slots=True)
class HsdpSetup:
    """What one measurement trains."""

    steps: int = 1  # of a block
    replicas: int = 3
    ranks: int = 2
    hosts: int = 1  # of each replica; its ranks are spread over them
    sections: Sections = field(default_factory=dict)  # more of the configuration
    waiting: tuple[int, float] | None = None  # (elements of a layer, seconds) of a model that waits: `Waiting`
    hugging_face: bool = False  # the Llama of transformers instead of the built-in one; of the same shape
    wait_s: float = 0.0  # how long a step of either waits, over all layers, besides what it computes


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Which rank a worker process is."""

    kind: str  # alone, hsdp or ft_hsdp
    replicas: int
    ranks: int
    replica: int
    rank: int
    host: str  # its host's address
    leader: str  # the address of its replica's first host
    first: str  # the address of replica 0
    name: str  # of its host, if there are several of a replica, else ""
    first_here: bool  # of its host
    interface: str  # the way to the other replicas
    port: int  # of a store
    config: str  # its own YAML file
    run: str
    waiting: tuple[int, float] | None
    hugging_face: bool
    wait_s: float


def job_config(setup: HsdpSetup, host: str, runs: Path) -> Config:
    """Return the job as ``host`` sees it: a transformer of 10 million parameters, 256 tokens a rank and step.

    A rank's gradient is 20 MB, and its exchange takes a link of 1 Gbit about as long as backward takes 2 cores.
    """
    base: Sections = {
        "job": {"name": "link", "runs_dir": str(runs)},
        "train": {"steps": ENDLESS, "micro_batch": 2, "seq_len": 128, "threads": 1},
        "model": {"dim": 320, "layers": 8, "heads": 5},
        "optim": {"clip": None},
        "ftar": {"timeout_s": PATIENCE_S},
        "network": {"host": host},
    }
    names = dict.fromkeys((*base, *setup.sections))
    merged = {name: {**base.get(name, {}), **setup.sections.get(name, {})} for name in names}
    return parse({"replicas": setup.replicas, "ranks_per_replica": setup.ranks, **merged})


class Loopback:
    """Where replicas are: all on this machine. `benchmarks.namespaces` gives each a network of its own."""

    hub = ""  # where the lighthouse is
    interface = "lo"  # between replicas

    def __init__(self, replicas: int, python: str = sys.executable) -> None:
        """Prepare a place for ``replicas``, whose processes are run by the interpreter ``python``."""
        self.replicas: tuple[str, ...] = ("",) * replicas  # where each replica, or host of one, is
        self._python = python
        self._ports: dict[tuple[int, int], int] = {}

    def host(self, replica: int | None = None) -> str:
        """Return the address of a replica; of the hub, if None."""
        return LOOPBACK

    def inside(self, place: str, *command: str) -> list[str]:
        """Return the command that does this at `hub` or at one of `replicas`: a command of `tied`."""
        return [self._python, *command[1:]]

    def port(self, number: int, replica: int) -> int:
        """Return a port at a replica for the store of contender ``number``: the same for the same place."""
        if (number, replica) not in self._ports:
            self._ports[number, replica] = free_port(LOOPBACK)
        return self._ports[number, replica]


WORKER = "ft_hsdp.bench.hsdp.worker"


class TrainingProcesses:
    """All ranks of one contender."""

    def __init__(self, name: str, links: Sequence[WorkerLink]) -> None:
        self.name = name
        self.links = list(links)  # replica by replica

    def train(self, steps: int, lead: int = 0) -> float:
        """Train so many steps.

        Args:
            steps: that are timed.
            lead: steps before them, which are not: the first step after a pause has no copies beside it.

        Returns:
            Seconds of a step: from a common start, or the slowest rank's end of the lead, until the slowest rank
            could begin the next, over ``steps``.
        """
        start = time.monotonic() + LEAD_S
        answers = ask(self.links, {"lead": lead, "steps": steps, "at": start})
        began = max(answer["began"] for answer in answers) if lead else start
        return (max(answer["t"] for answer in answers) - began) / steps

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
    for replica, rank in product(range(setup.replicas), range(setup.ranks)):
        first, each = replica * setup.hosts, setup.ranks // setup.hosts
        at = first + rank // each
        host, several = place.host(at), f"r{replica}h{at - first}" if setup.hosts > 1 else ""
        file = folder / f"{at}.yaml"
        if rank % each == 0:
            file.write_text(dump(job_config(setup, host, run.path.parent)))
            if kind == PRODUCT:
                _start_agent(replica, host, several, run, place.replicas[at], place, stack)
        spec = RankSpec(
            kind,
            setup.replicas,
            setup.ranks,
            replica,
            rank,
            host,
            place.host(first),
            place.host(0),
            several,
            rank % each == 0,
            place.interface,
            place.port(number, 0 if kind == "hsdp" else replica),
            str(file),
            str(run.path),
            setup.waiting,
            setup.hugging_face,
            setup.wait_s,
        )
        log = folder / f"{name.replace(' ', '-')}-{replica}-{rank}.log"
        within = partial(place.inside, place.replicas[at])
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


def _start_agent(
    replica: int, host: str, name: str, run: RunDir, where: str, place: Loopback, stack: ExitStack
) -> None:
    """Start the state agent of a replica on the host of this name, which waits for its ranks."""
    command = tied("ft_hsdp.state.agent.server", "--replica", str(replica), "--host", host, "--name", name)
    log = run.path.parent / f"agent-{replica}{name}.log"
    token = run.token.read_text().strip()
    spawn(stack, place.inside(where, *command), log, {TOKEN_VARIABLE: token})
