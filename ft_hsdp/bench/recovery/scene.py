"""What is trained while replicas are killed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_hsdp.config import Config, parse

ENDLESS = 10**6  # steps and restarts: the job is ended when the bench has enough
FILE = "scene.json"  # beside the run: what the trainers wait for


@dataclass(frozen=True, slots=True)
class Scene:
    """A job of `replicas` x `ranks`; a step waits `wait_s` seconds over `layers` layers of `elements` parameters.

    Nothing is computed meanwhile: with more processes than cores, a step would be faster for each that is dead.
    sections: more of the configuration.
    """

    replicas: int = 4
    ranks: int = 1
    layers: int = 2
    elements: int = 1 << 17
    wait_s: float = 0.03
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def config(scene: Scene, runs: Path) -> Config:
    """The configuration of the job, under `runs`."""
    return parse(
        {
            "job": {"name": "recovery", "runs_dir": str(runs)},
            "replicas": scene.replicas,
            "ranks_per_replica": scene.ranks,
            "train": {"steps": ENDLESS, "threads": 1},
            "optim": {"clip": None},
            "restart": {"budget": ENDLESS},
            **scene.sections,
        }
    )
