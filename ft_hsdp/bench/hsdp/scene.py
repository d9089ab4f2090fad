"""What is trained, where, and how it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ft_hsdp.config import Config, parse

REPLICAS, RANKS = 3, 2
ENDLESS = 10**6  # steps: the crew is killed when the bench has enough
PATIENCE_S = 120.0  # longest silence of anything


@dataclass(frozen=True, slots=True)
class Scene:
    """One measurement.

    rounds of one block of `steps` steps of each crew; rate of each replica's link, as tc says it, and in bits/s;
    congestion: of all TCP in the namespaces, "" for the machine's default; ftar: ft_hsdp's section of that name.
    """

    rounds: int = 20
    steps: int = 1
    rate: str = "1gbit"
    bits_per_s: float = 1e9
    congestion: str = ""
    ftar: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker process: `host` is its replica's address, `first` that of replica 0; `config` its own YAML."""

    crew: str
    replica: int
    rank: int
    host: str
    first: str
    port: int
    config: str
    run: str


def config(scene: Scene, host: str, runs: Path) -> Config:
    """The job as it is seen at `host`: a transformer of 10 million parameters, 256 tokens a rank and step.

    A rank's gradient is 20 MB, and its exchange takes a link of 1 Gbit about as long as backward takes 2 cores.
    """
    return parse(
        {
            "job": {"name": "link", "runs_dir": str(runs)},
            "replicas": REPLICAS,
            "ranks_per_replica": RANKS,
            "train": {"steps": ENDLESS, "micro_batch": 2, "seq_len": 128, "threads": 1},
            "model": {"dim": 320, "layers": 8, "heads": 5},
            "optim": {"clip": None},
            "ftar": {**scene.ftar, "timeout_s": PATIENCE_S},
            "network": {"host": host},
        }
    )
