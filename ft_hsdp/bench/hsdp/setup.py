"""What is trained beside PyTorch's HSDP, and where: on this machine's loopback, without a limit. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_hsdp.config import Config, parse
from ft_hsdp.launch.backend.processes import free_port

Sections = Mapping[str, Mapping[str, Any]]
ENDLESS = 10**6  # steps: the processes are killed when the bench has enough
PATIENCE_S = 120.0  # longest silence of anything
LOOPBACK = "127.0.0.1"
PRODUCT = "ft_hsdp"  # the kind that needs a lighthouse and state agents


@dataclass(frozen=True, slots=True)
class HsdpSetup:
    """What one measurement trains, and how often."""

    rounds: int = 20  # blocks of steps of each contender
    steps: int = 1  # of a block
    replicas: int = 3
    ranks: int = 2
    rate: str = "1gbit"  # of each replica's link, as tc says it
    bits_per_s: float = 1e9  # the same
    congestion: str = ""  # control of all TCP in the namespaces, "" for the machine's default
    sections: Sections = field(default_factory=dict)  # more of the configuration
    waiting: tuple[int, float] | None = None  # (elements of a layer, seconds) of a model that waits: `Waiting`


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Which rank a worker process is."""

    kind: str  # alone, hsdp or ft_hsdp
    replicas: int
    ranks: int
    replica: int
    rank: int
    host: str  # its replica's address
    first: str  # the address of replica 0
    interface: str  # the way to the other replicas
    port: int  # of a store
    config: str  # its own YAML file
    run: str
    waiting: tuple[int, float] | None


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
    """Where replicas are: all on this machine. `bench.hsdp.network.Network` gives each a namespace of its own."""

    hub = ""  # where the lighthouse is
    interface = "lo"  # between replicas

    def __init__(self, replicas: int) -> None:
        self.replicas: tuple[str, ...] = ("",) * replicas  # where each replica is
        self._ports: dict[tuple[int, int], int] = {}

    def host(self, replica: int | None = None) -> str:
        """Return the address of a replica; of the hub, if None."""
        return LOOPBACK

    def inside(self, place: str, *command: str) -> list[str]:
        """Return the command that does this at `hub` or at one of `replicas`."""
        return list(command)

    def port(self, number: int, replica: int) -> int:
        """Return a port at a replica for the store of contender ``number``: the same for the same place."""
        if (number, replica) not in self._ports:
            self._ports[number, replica] = free_port(LOOPBACK)
        return self._ports[number, replica]
