"""Where and with what a measurement was taken: a figure without it cannot be compared.

Memory: all contenders hold their tensors at once, and the machine has other users.

Some times of one thing, as figures.

A ratio of medians, and between which bounds it is: by resampling (the bootstrap's percentiles).

The order of samples: a figure is only comparable with one that was taken a moment before or after it.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil

import ft_hsdp
from ft_hsdp.bench.contenders.roster import Contender, version
from ft_hsdp.bench.options import GIB, KIB, MIB, size_name
from ft_hsdp.errors import ConfigError

PACKAGES = ("torch", "torchft", "mpi4py", "openmpi", "numpy")


def machine() -> dict[str, Any]:
    """Processor, memory, kernel, and what the kernel does to TCP."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "tcp_congestion_default": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "tcp_congestion_allowed": _read("/proc/sys/net/ipv4/tcp_allowed_congestion_control"),
        "load_1min_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str | None]:
    """Of this package, Python and everything that sums here; None where it is absent."""
    found = {package: version(package) for package in PACKAGES}
    return {"ft_hsdp": ft_hsdp.__version__, "python": platform.python_version(), **found}


def now() -> str:
    """Local date and time with its offset, ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _cpu() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


SPARE = 1.2  # of what the tensors take


def check_memory(contenders: Iterable[Contender], members: int, size: int) -> None:
    """Raises ConfigError where tensors of `size` bytes do not fit at all members of all contenders at once."""
    copies = sum(contender.copies for contender in contenders) * members
    check_room(copies, size, "all contenders at once take")


def check_room(copies: int, size: int, who: str) -> None:
    """Raises ConfigError where `copies` times `size` bytes do not fit."""
    need, free = SPARE * copies * size, psutil.virtual_memory().available
    if need > free:
        allowed = f"what fits into {free / GIB:.1f} GiB; {who} {need / GIB:.1f} GiB"
        raise ConfigError("--sizes", size_name(size), allowed)


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


RESAMPLES = 2000
LEVEL = 0.95
SEED = 1


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
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
