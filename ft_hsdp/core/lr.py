"""Learning rate: the schedule, and the correction for a step with fewer contributors (FT-HSDP §6.2)."""

from __future__ import annotations

import math
from typing import Literal

Intervention = Literal["none", "linear", "sqrt"]
Schedule = Literal["constant", "cosine", "linear"]
_POWER = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def scale(intervention: Intervention, contributors: int, total: int) -> float:
    """Return the factor on the learning rate of a step to which not all replicas contributed (FT-HSDP §6.2).

    It is computed from the commit record, so it is right on the step on which a replica leaves and on the one on
    which it returns. 11 of 12 contributors give 0.9167 (linear) or 0.9574 (sqrt).

    Args:
        intervention: how the factor depends on the share of contributors.
        contributors: replicas in the sum.
        total: replicas of the job.

    Returns:
        A factor in (0, 1].

    Raises:
        ValueError: `contributors` is not in 1..`total`.
    """
    if not 0 < contributors <= total:
        raise ValueError(f"contributors must be within 1..{total}, got {contributors}")
    return float((contributors / total) ** _POWER[intervention])


def scheduled(schedule: Schedule, base: float, step: int, steps: int, warmup: int, min_ratio: float) -> float:
    """Return the learning rate of a step before the correction of `scale`.

    Args:
        schedule: its shape after the warm-up.
        base: the highest learning rate.
        step: number of the step, from 1.
        steps: steps of the job.
        warmup: steps of the linear warm-up; 0: none.
        min_ratio: learning rate of the last step, divided by `base`.

    Returns:
        The learning rate.
    """
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
