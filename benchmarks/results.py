"""Figures and what stands beside them: statistics, the order of samples, goals, the machine, progress and output.

A figure without its machine cannot be compared. A figure can only be compared with one that was taken a moment
before or after it, so `interleave` takes the samples of all contenders in turn.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import psutil
import yaml
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import ft_hsdp
from benchmarks.command import GIB, KIB, MIB
from ft_hsdp.errors import ConfigError

ResultRow = dict[str, Any]
"""One line of a result, ready for JSON."""

Row = Mapping[str, Any]

PACKAGES = ("torch", "torchft", "numpy")  # whose versions are written down
BUSY = 1.0  # load from which on others have disturbed
SPARE = 1.2  # memory that must be free, as a multiple of what the tensors take
DIGITS = 4  # of a millisecond
RESAMPLES, LEVEL, SEED = 2000, 0.95, 1  # of the interval of a ratio
WARM_UP = 3  # rounds that do not count
WIDTH = 64  # of the lines of figures

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


@dataclass(frozen=True, slots=True)
class GoalVerdict:
    """One goal beside one figure."""

    text: str  # with the unit of ``limit`` and ``seen``
    members: int | None
    bytes: int | None
    bound: str
    limit: float
    seen: float
    met: bool  # whether the goal is kept

    def where(self) -> str:
        """Return the ring and the message that it is about."""
        ring = None if self.members is None else f"N={self.members}"
        return ", ".join(filter(None, (ring, None if self.bytes is None else size_name(self.bytes))))


Verdicts = Iterator[GoalVerdict]


def least(text: str, row: Row, limit: float, seen: float) -> GoalVerdict:
    """Return the verdict on a goal that is kept if ``seen`` is at least ``limit``."""
    return GoalVerdict(text, _members(row), row.get("bytes"), ">=", limit, seen, seen >= limit)


def most(text: str, row: Row, limit: float, seen: float) -> GoalVerdict:
    """Return the verdict on a goal that is kept if ``seen`` is at most ``limit``."""
    return GoalVerdict(text, _members(row), row.get("bytes"), "<=", limit, seen, seen <= limit)


def _members(row: Row) -> int | None:
    return row.get("members", row.get("replicas"))


def begin_result(bench: str, log: ProgressLog) -> tuple[dict[str, Any], float]:
    """Return a result without figures, and when it was begun; notes if the machine has other work."""
    load = round(os.getloadavg()[0], 2)
    if load > BUSY:
        log.note(f"the machine was busy: a load of {load:g} before; read nothing into these figures")
    where = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "tcp_congestion_default": _read("/proc/sys/net/ipv4/tcp_congestion_control").strip(),
        "tcp_congestion_allowed": _read("/proc/sys/net/ipv4/tcp_allowed_congestion_control").strip(),
        "load_1min_before": load,
    }
    versions = {"ft_hsdp": ft_hsdp.__version__, "python": platform.python_version()}
    found = {"machine": where, "versions": {**versions, **{name: version(name) for name in PACKAGES}}}
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"bench": bench, "date": date, **found}, time.monotonic()


def finish_result(result: dict[str, Any], goals: Verdicts, log: ProgressLog, started: float) -> dict[str, Any]:
    """Return the result with its goals, notes and duration: ready for JSON."""
    result["goals"] = [asdict(verdict) for verdict in goals]
    result["notes"] = log.notes
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _field(path: str, wanted: str) -> str:
    fields = (line.partition(":") for line in _read(path).splitlines())
    return next((value.strip() for name, _, value in fields if name.strip() == wanted), "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def show(result: Row, stream: TextIO) -> None:
    """Print a result: where and with what it was measured, the figures, a table of the goals, the notes."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    machine = result["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    said = [
        f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_1min_before']} "
        f"before; {versions}; TCP congestion control {machine['tcp_congestion_default']} by default",
        *(
            f"  {name:<10} {text}"
            for name, text in {**result.get("contenders", {}), **result.get("kinds", {})}.items()
        ),
    ]
    for measure, rows in result.items():
        if isinstance(rows, list) and measure not in ("goals", "notes"):
            for row in json.loads(json.dumps(rows)):
                figures = yaml.safe_dump(row, sort_keys=False, default_flow_style=None, width=WIDTH)
                said.append(f"\n{measure}:\n{figures.rstrip()}")
    for text in said:
        console.print(escape(text))
    if result["goals"]:
        table = Table(title="Goals", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for number, head in enumerate(("goal", "", "wanted", "seen", "")):
            table.add_column(head, justify="right" if number else "left")
        for goal in (GoalVerdict(**each) for each in result["goals"]):
            met = "[green]met[/]" if goal.met else "[red]missed[/]"
            table.add_row(escape(goal.text), goal.where(), f"{goal.bound} {goal.limit:g}", f"{goal.seen:.3g}", met)
        console.print(table)
    for note in result["notes"]:
        console.print(escape(f"note: {note}"))


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


def times_as_fast(row: Row, name: str, other: str) -> float:
    """Return how many times as fast contender ``name`` of a row is as ``other``: a ratio of medians."""
    return ratio(row["contenders"][other]["p50_ms"], row["contenders"][name]["p50_ms"])


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
