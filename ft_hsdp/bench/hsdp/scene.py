"""What is trained, where, and how it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_hsdp.config import Config, parse

Sections = Mapping[str, Mapping[str, Any]]
ENDLESS = 10**6  # steps: the crew is killed when the bench has enough
PATIENCE_S = 120.0  # longest silence of anything


@dataclass(frozen=True, slots=True)
class HsdpScene:
    """One measurement.

    rounds of one block of `steps` steps of each crew; rate of each replica's link, as tc says it, and in bits/s;
    congestion: of all TCP in the namespaces, "" for the machine's default; sections: more of the configuration;
    waiting: (elements of a layer, seconds), for a model that waits instead of computing, see `Waiting`.
    """

    rounds: int = 20
    steps: int = 1
    replicas: int = 3
    ranks: int = 2
    rate: str = "1gbit"
    bits_per_s: float = 1e9
    congestion: str = ""
    sections: Sections = field(default_factory=dict)
    waiting: tuple[int, float] | None = None


@dataclass(frozen=True, slots=True)
class HsdpSeat:
    """One worker process of a replica of `ranks`, of `replicas`.

    host: its replica's address, first: that of replica 0, interface: the way to the others; port: of a store;
    config: its own YAML; waiting: see `HsdpScene`.
    """

    crew: str
    replicas: int
    ranks: int
    replica: int
    rank: int
    host: str
    first: str
    interface: str
    port: int
    config: str
    run: str
    waiting: tuple[int, float] | None


def config(scene: HsdpScene, host: str, runs: Path) -> Config:
    """The job as it is seen at `host`: a transformer of 10 million parameters, 256 tokens a rank and step.

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
    names = dict.fromkeys((*base, *scene.sections))
    merged = {name: {**base.get(name, {}), **scene.sections.get(name, {})} for name in names}
    return parse({"replicas": scene.replicas, "ranks_per_replica": scene.ranks, **merged})
