"""What is trained while replicas are killed. Imports no torch, and nothing that takes time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FILE = "scene.json"  # beside the run: what the trainers train


@dataclass(frozen=True, slots=True)
class RecoveryScene:
    """A job of `replicas` x `ranks`; a step waits `wait_s` seconds over `layers` layers of `elements` parameters.

    Nothing is computed meanwhile: with more processes than cores, a step would be faster for each that is dead.
    transformer: the quickstart's model instead, which computes; sections: more of the configuration.
    """

    replicas: int = 4
    ranks: int = 1
    layers: int = 2
    elements: int = 1 << 17
    wait_s: float = 0.03
    transformer: bool = False
    sections: Mapping[str, Any] = field(default_factory=dict)
