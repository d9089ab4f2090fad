"""Some times of one thing, as figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

DIGITS = 4  # of a millisecond


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest, in milliseconds, and how many there were."""
    return {
        "p50_ms": milliseconds(statistics.median(seconds)),
        "min_ms": milliseconds(min(seconds)),
        "max_ms": milliseconds(max(seconds)),
        "count": len(seconds),
    }


def milliseconds(seconds: float) -> float:
    """Seconds as rounded milliseconds."""
    return round(seconds * 1e3, DIGITS)


def ratio(over: float, under: float) -> float:
    """`over` / `under`, rounded."""
    return round(over / under, 3)
