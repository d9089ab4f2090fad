"""A ratio of medians, and between which bounds it is: by resampling (the bootstrap's percentiles)."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from ft_hsdp.bench.spread import ratio

RESAMPLES = 2000
LEVEL = 0.95
SEED = 1


def times(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """{"ratio", "low", "high"}: median of `over` / median of `under`, and its 95 % interval.

    Values at the same place were taken one after the other and are drawn together, so what slows both cancels out.
    """
    chance, places = random.Random(SEED), range(len(over))
    found = []
    for _ in range(RESAMPLES):
        drawn = chance.choices(places, k=len(places))
        found.append(statistics.median(over[n] for n in drawn) / statistics.median(under[n] for n in drawn))
    found.sort()
    tail = round(RESAMPLES * (1 - LEVEL) / 2)
    return {
        "ratio": ratio(statistics.median(over), statistics.median(under)),
        "low": round(found[tail], 3),
        "high": round(found[-tail - 1], 3),
    }
