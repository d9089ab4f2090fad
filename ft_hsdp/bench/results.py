"""Figures and what stands beside them: statistics, the order of samples, the machine, and the progress of a bench.

A figure without its machine cannot be compared. A figure can only be compared with one that was taken a moment
before or after it, so `interleave` takes the samples of all contenders in turn.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import psutil

import ft_hsdp
from ft_hsdp.bench.contenders.base import version
from ft_hsdp.errors import ConfigError

ResultRow = dict[str, Any]
"""One line of a result, ready for JSON."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
PACKAGES = ("torch", "torchft", "numpy")  # whose versions are written down
SPARE = 1.2  # memory that must be free, as a multiple of what the tensors take
DIGITS = 4  # of a millisecond
RESAMPLES, LEVEL, SEED = 2000, 0.95, 1  # of the interval of a ratio
WARM_UP = 3  # rounds that do not count
BATCHES = ((256 * KIB, 20), (4 * MIB, 5))  # up to this size, so many all-reduces in a row make a sample

_K = TypeVar("_K")


@dataclass(slots=True)
class ProgressLog:
    """Where a bench says how it goes."""

    stream: TextIO
    notes: list[str] = field(default_factory=list)  # lines that belong to the result as well

    def say(self, text: str) -> None:
        """Print one line at once."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def note(self, text: str) -> None:
        """Print one line that a reader of the figures has to know, once."""
        if text not in self.notes:
            self.notes.append(text)
            self.say(f"note: {text}")


def machine() -> dict[str, Any]:
    """Return processor, memory, kernel, and what the kernel does to TCP."""
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
    """Return the versions of this package, Python and `PACKAGES`; None where one is not installed."""
    found = {package: version(package) for package in PACKAGES}
    return {"ft_hsdp": ft_hsdp.__version__, "python": platform.python_version(), **found}


def now() -> str:
    """Return local date and time with its offset, ISO 8601."""
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


def size_name(size: int) -> str:
    """Return a number of bytes as people say it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def check_room(copies: int, size: int, what: str) -> None:
    """Raise ConfigError unless ``copies`` times ``size`` bytes fit into memory; ``what`` takes them."""
    need, free = SPARE * copies * size, psutil.virtual_memory().available
    if need > free:
        allowed = f"what fits into {free / GIB:.1f} GiB; {what} {need / GIB:.1f} GiB"
        raise ConfigError("--sizes", size_name(size), allowed)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, least and greatest in milliseconds, and how many there were."""
    return {
        "p50_ms": milliseconds(statistics.median(seconds)),
        "min_ms": milliseconds(min(seconds)),
        "max_ms": milliseconds(max(seconds)),
        "count": len(seconds),
    }


def milliseconds(seconds: float) -> float:
    """Return seconds as rounded milliseconds."""
    return round(seconds * 1e3, DIGITS)


def ratio(over: float, under: float) -> float:
    """Return ``over / under``, rounded."""
    return round(over / under, 3)


def ratio_interval(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return {"ratio", "low", "high"}: a ratio of medians and its 95 % interval, by resampling (the bootstrap).

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


def interleave(samples: Mapping[_K, Callable[[], float]], rounds: int) -> dict[_K, list[float]]:
    """Take one sample of each in every round (ABAB), after warming up; each round begins with another one."""
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
    """Return the all-reduces in a sample: short ones run in a row, so that the common start does not count."""
    return next((times for limit, times in BATCHES if size <= limit), 1)
