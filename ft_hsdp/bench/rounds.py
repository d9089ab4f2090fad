"""The order of samples: a figure is only comparable with one that was taken a moment before or after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ft_hsdp.bench.options import KIB, MIB

WARM_UP = 3  # rounds that do not count
BATCHES = ((256 * KIB, 20), (4 * MIB, 5))  # up to this size, so many all-reduces in a row make a sample

_K = TypeVar("_K")


def interleave(samples: Mapping[_K, Callable[[], float]], rounds: int) -> dict[_K, list[float]]:
    """One sample of each in every round (ABAB), after warming up; each round begins with another one."""
    keys = list(samples)
    values: dict[_K, list[float]] = {key: [] for key in keys}
    for number in range(-WARM_UP, rounds):
        first = number % len(keys)
        for key in (*keys[first:], *keys[:first]):
            value = samples[key]()
            if number >= 0:
                values[key].append(value)
    return values


def batch(size: int) -> int:
    """All-reduces in a sample of `size` bytes: short ones run in a row, for the common start not to count."""
    return next((times for limit, times in BATCHES if size <= limit), 1)
