"""What is trained beside PyTorch's HSDP, and the processes of one contender, each where its replica is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
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
    first: str  # the address of replica 0
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

    interface = "lo"  # between replicas

    def __init__(self, python: str = sys.executable) -> None:
        """Prepare a place whose processes are run by the interpreter ``python``."""
        self._python = python
        self._ports: dict[tuple[int, int], int] = {}

    def host(self, replica: int | None = None) -> str:
        """Return the address of a replica; of the hub, where the lighthouse is, if None."""
        return LOOPBACK

    def inside(self, replica: int | None, *command: str) -> list[str]:
        """Return the command that does this at a replica, or at the hub: a command of `tied`."""
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

    def train(self, steps: int) -> float:
        """Train so many steps; return the seconds of one: until the slowest rank could begin the next."""
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
        host, within = place.host(replica), partial(place.inside, replica)
        file = folder / f"{replica}.yaml"
        file.write_text(dump(job_config(setup, host, run.path.parent)))
        if kind == PRODUCT:  # the state agent waits for the ranks
            agent = within(*tied("ft_hsdp.state.agent.server", "--replica", str(replica), "--host", host))
            env = {TOKEN_VARIABLE: run.token.read_text().strip()}
            spawn(stack, agent, run.path.parent / f"agent-{replica}.log", env)
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
                setup.hugging_face,
                setup.wait_s,
            )
            log = folder / f"{name.replace(' ', '-')}-{replica}-{rank}.log"
            worker = f"{name} replica {replica} rank {rank}"
            links.append(spawn_worker(stack, worker, WORKER, [json.dumps(asdict(spec))], log, within=within))
    return TrainingProcesses(name, links)


def start_lighthouse(place: Loopback, setup: HsdpSetup, folder: Path, stack: ExitStack) -> RunDir:
    """Make ft_hsdp's run in ``folder`` and start its lighthouse at the hub; return the run. Raises Retryable."""
    run = RunDir(folder / "runs" / "link")
    write_job_files(run, job_config(setup, place.host(), run.path.parent))
    command = place.inside(None, *tied("lighthouse", "--run", str(run.path)))
    process = spawn(stack, command, run.lighthouse_log)
    listening(process, run.lighthouse, run.lighthouse_log, "the lighthouse")
    return run
