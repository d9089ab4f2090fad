"""Spans of time as figures: what happens as a rule, and what happens once in a hundred times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ft_hsdp.bench.recovery.reckon import quantile
from ft_hsdp.bench.spread import milliseconds


def span(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and greatest, in milliseconds, and how many there were."""
    return {
        "p50_ms": milliseconds(statistics.median(seconds)),
        "p99_ms": milliseconds(quantile(seconds, 0.99)),
        "max_ms": milliseconds(max(seconds)),
        "count": len(seconds),
    }
