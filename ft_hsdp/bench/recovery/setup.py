"""What is trained while replicas are killed. Imports no torch, and nothing that takes time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_hsdp.config import Config, parse

FILE = "setup.json"  # beside the run: what the ranks train
ENDLESS = 10**6  # steps and restarts: the job is ended when the bench has enough
SHARE = 0.05  # of a CPU that a Ray cluster sets aside for a rank: many share those that there are


@dataclass(frozen=True, slots=True)
class RecoverySetup:
    """A job of ``replicas`` x ``ranks``.

    Nothing is computed in a step that waits: with more processes than cores, a step would be faster for each that
    is dead.
    """

    replicas: int = 4
    ranks: int = 1
    layers: int = 2
    elements: int = 1 << 17  # parameters of a layer
    wait_s: float = 0.03  # how long a step waits over all layers
    transformer: bool = False  # the quickstart's model instead, which computes
    built_in: bool = False  # the built-in trainer, or the entry of `sections`, with model and data of these
    sections: Mapping[str, Any] = field(default_factory=dict)  # more of the configuration


def job_config(setup: RecoverySetup, runs: Path) -> Config:
    """Return the configuration of a job of ft_hsdp; all that belongs to the job is under ``runs``."""
    return parse(
        {
            "job": {"name": "recovery", "runs_dir": str(runs)},
            "replicas": setup.replicas,
            "ranks_per_replica": setup.ranks,
            "train": {"steps": ENDLESS, "threads": 1},
            "optim": {"clip": None},
            "restart": {"budget": ENDLESS},
            "ray": {"folder": str(runs), "cpus_per_rank": SHARE},
            **setup.sections,
        }
    )
