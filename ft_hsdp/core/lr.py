"""Learning rate: the schedule, and the intervention for a step with fewer contributors (FT-HSDP §6.2)."""

from __future__ import annotations

import math
from typing import Literal

Intervention = Literal["none", "linear", "sqrt"]
Schedule = Literal["constant", "cosine", "linear"]
_POWER = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def scale(intervention: Intervention, contributors: int, total: int) -> float:
    """The factor on the learning rate of a step to which ``contributors`` of ``total`` replicas contributed.

    11 of 12 give 0.9167 (linear) or 0.9574 (sqrt). Computed at commit, from the commit record, so that it is
    right on the step on which a replica leaves and on the one on which it returns.
    """
    if not 0 < contributors <= total:
        raise ValueError(f"contributors must be within 1..{total}, got {contributors}")
    return float((contributors / total) ** _POWER[intervention])


def scheduled(schedule: Schedule, base: float, step: int, steps: int, warmup: int, min_ratio: float) -> float:
    """The learning rate of step ``step`` (from 1) of ``steps``, before the intervention."""
    if step <= warmup:
        return base * step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    match schedule:
        case "constant":
            return base
        case "linear":
            return base * (1.0 - (1.0 - min_ratio) * done)
        case "cosine":
            return base * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done)))
