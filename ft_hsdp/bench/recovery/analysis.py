"""What a kill cost the others: figures from the commits of a run with kills. Pure; times are in seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_hsdp.bench.results import milliseconds

Row = Mapping[str, Any]
"""A commit, as it was logged."""


def span(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and greatest in milliseconds, and how many there were."""
    return {
        "p50_ms": milliseconds(statistics.median(seconds)),
        "p99_ms": milliseconds(quantile(seconds, 0.99)),
        "max_ms": milliseconds(max(seconds)),
        "count": len(seconds),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank of a replica's incarnation got SIGKILL or SIGSTOP at ``t``."""

    t: float
    replica: int
    rank: int
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Stall:
    """What a kill cost the survivors."""

    next_s: float  # from the kill to the last survivor's first commit without the victim
    less_one_s: float  # the same less one fault-free step
    stall_s: float  # from the commit before the kill to that commit, less as many fault-free steps


def gone(row: Row, kill: Kill) -> bool:
    """Return whether a commit is one without the victim of ``kill``."""
    return kill.replica not in row["contributors"]


def contributes(row: Row) -> bool:
    """Return whether the replica that logged a commit contributed to it."""
    return bool(row["role"] == "contribute")


def stall(kill: Kill, rows: Mapping[int, Sequence[Row]], step_s: float) -> Stall | None:
    """Return what ``kill`` cost the survivors; None where one of them logged too little.

    Args:
        kill: the kill.
        rows: the commits that each survivor logged.
        step_s: a fault-free step.
    """
    ends: list[Stall] = []
    for mine in rows.values():
        before = [row for row in mine if row["t"] <= kill.t]
        after = next((row for row in mine if row["t"] > kill.t and gone(row, kill)), None)
        if not before or after is None:
            return None
        next_s, steps = after["t"] - kill.t, after["step"] - before[-1]["step"]
        ends.append(Stall(next_s, next_s - step_s, after["t"] - before[-1]["t"] - steps * step_s))
    return max(ends, key=lambda each: each.next_s, default=None)


def stalls(kills: Iterable[Kill], rows: Mapping[int, Sequence[Row]], step_s: float) -> list[Stall | None]:
    """Return what each kill cost the survivors; ``rows``: the commits that each replica logged."""
    return [
        stall(kill, {replica: each for replica, each in rows.items() if replica != kill.replica}, step_s)
        for kill in kills
    ]


def costs(found: Sequence[Stall], step_s: float) -> dict[str, Any]:
    """Return the figures of some stalls."""
    return {
        "step_ms": milliseconds(step_s),
        "next": span([each.next_s for each in found]),
        "less_one": span([each.less_one_s for each in found]),
        "stall": span([each.stall_s for each in found]),
    }
