"""Curves of a job in bounded memory, thinned out to what a page can draw. Pure.

The newest commits are kept one by one, older ones summed up in buckets of 4, 16, 64 ... commits, `KEPT` buckets of
each size at least.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ft_hsdp.analysis.commits import MAX_VALUES

KEPT = 8192  # records of each level, at least; the oldest are dropped once there are twice as many
POINTS = 4096  # of a curve of logged values, at least; of twice as many every second one is dropped
FANOUT = 4
LEVELS = 9  # the last one spans 8192 x 4^8 commits
FIELDS = ("t", "step", "loss", "step_s", "gbps", "healthy", "lr_scale", "units", "useful", "gap")
WIDTH = len(FIELDS)
COLUMNS = ("t", "step", "loss", "step_s", "gbps", "healthy", "lr_scale", "units", "effective")

_T, _STEP, _LOSS, _STEP_S, _GBPS, _HEALTHY, _LR, _UNITS, _USEFUL, _GAP = range(WIDTH)


class Series:
    """Records of commits.

    A record has t (Unix seconds), step, loss (NaN: none), step_s, GB/s of FTAR, the number of contributors,
    lr_scale, the number of units (NaN: not known), and the useful and the whole seconds that `Goodput.commit`
    returns.
    """

    def __init__(self) -> None:
        self._levels = [array("d")]
        self._fed = [0]  # of each level: how many of its values are in the next one
        self._short: set[int] = set()  # levels that have dropped records

    def add(self, record: Sequence[float]) -> None:
        """Take the record of a commit, in amortized constant time."""
        level = self._levels[0]
        level.extend(record)
        if len(level) - self._fed[0] >= FANOUT * WIDTH:
            self._carry()

    def _carry(self) -> None:
        """Sum up the newest records of each level in the next one, and drop its oldest."""
        n = 0
        while True:
            level, fed = self._levels[n], self._fed[n]
            if len(level) - fed < FANOUT * WIDTH:
                return
            if n + 1 < LEVELS:
                if n + 1 == len(self._levels):
                    self._levels.append(array("d"))
                    self._fed.append(0)
                self._levels[n + 1].extend(_sum(level[fed : fed + FANOUT * WIDTH]))
            self._fed[n] = fed + FANOUT * WIDTH
            if len(level) >= 2 * KEPT * WIDTH:
                del level[: KEPT * WIDTH]
                self._short.add(n)
                self._fed[n] -= KEPT * WIDTH
            n += 1
            if n == len(self._levels):
                return

    def between(self, start: float, end: float, points: int) -> dict[str, list[Any]]:
        """Return at most ``points`` buckets of equal length from ``start`` to ``end`` (Unix seconds), as columns.

        Empty buckets are left out. step_s is the longest of a bucket, healthy and units the fewest, t and step
        are the last; the others are means.
        """
        buckets: dict[int, list[float]] = {}
        records = self._records(start, end, points)
        if records and len(records) <= points * WIDTH:
            rows = [list(records[i : i + WIDTH]) for i in range(0, len(records), WIDTH)]
        else:
            width = max(end - start, 1e-9) / points
            for i in range(0, len(records), WIDTH):
                key = min(points - 1, int((records[i] - start) / width))
                buckets.setdefault(key, []).extend(records[i : i + WIDTH])
            rows = [_sum(array("d", buckets[key])) for key in sorted(buckets)]
        return _columns(rows)

    def _records(self, start: float, end: float, points: int) -> array[float]:
        """Return the records between two times, of the coarsest level that reaches ``start`` and has enough."""
        n = next((n for n, level in enumerate(self._levels) if self._reaches(n, start)), len(self._levels) - 1)
        while n + 1 < len(self._levels) and self._count(n + 1, start, end) >= points:
            n += 1
        level = self._levels[n]
        found = level[_at(level, start) * WIDTH : _at(level, end, after=True) * WIDTH]
        for k in range(n - 1, -1, -1):  # what is not summed up yet
            tail = self._levels[k][self._fed[k] :]
            for i in range(0, len(tail), WIDTH):
                if start <= tail[i] <= end:
                    found.extend(tail[i : i + WIDTH])
        return found

    def _reaches(self, n: int, start: float) -> bool:
        return n not in self._short or self._levels[n][_T] <= start

    def _count(self, n: int, start: float, end: float) -> int:
        return _at(self._levels[n], end, after=True) - _at(self._levels[n], start)


def _at(level: array[float], t: float, after: bool = False) -> int:
    """Return the index of the first record at or after ``t``, or strictly after it if ``after``."""
    low, high = 0, len(level) // WIDTH
    while low < high:
        middle = (low + high) // 2
        value = level[middle * WIDTH]
        if value < t or (after and value == t):
            low = middle + 1
        else:
            high = middle
    return low


def _sum(records: array[float]) -> list[float]:
    losses = [x for x in records[_LOSS::WIDTH] if not math.isnan(x)]
    units = [x for x in records[_UNITS::WIDTH] if not math.isnan(x)]
    n = len(records) // WIDTH
    return [
        records[_T - WIDTH],
        max(records[_STEP::WIDTH]),
        sum(losses) / len(losses) if losses else math.nan,
        max(records[_STEP_S::WIDTH]),
        sum(records[_GBPS::WIDTH]) / n,
        min(records[_HEALTHY::WIDTH]),
        sum(records[_LR::WIDTH]) / n,
        min(units, default=math.nan),
        sum(records[_USEFUL::WIDTH]),
        sum(records[_GAP::WIDTH]),
    ]


def _columns(rows: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {name: [row[n] for row in rows] for n, name in enumerate(COLUMNS[:-1])}
    out["loss"] = [None if math.isnan(x) else x for x in out["loss"]]
    out["units"] = [None if math.isnan(x) else int(x) for x in out["units"]]
    out["step"] = [int(x) for x in out["step"]]
    out["healthy"] = [int(x) for x in out["healthy"]]
    out["effective"] = [min(1.0, row[_USEFUL] / row[_GAP]) if row[_GAP] > 0 else None for row in rows]
    return out


class Value(NamedTuple):
    t: float  # Unix seconds
    step: int
    epoch: int  # in which it was logged
    value: float


class LoggedCurves:
    """Takes rows of logged values in the order in which they came."""

    def __init__(self) -> None:
        self._of: dict[str, list[Value]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one row. Values of a step that was rolled back are replaced by those of a later epoch."""
        t, step, epoch = row["t"], row["step"], row["epoch"]
        for name, value in row["values"].items():
            if value is None:
                continue
            if name not in self._of and len(self._of) >= MAX_VALUES:
                continue
            points = self._of.setdefault(name, [])
            while points and points[-1].step >= step and points[-1].epoch < epoch:
                points.pop()
            points.append(Value(max(t, points[-1].t if points else t), step, epoch, value))
            if len(points) >= 2 * POINTS:
                del points[1::2]

    def between(self, start: float, end: float, most: int) -> dict[str, dict[str, list[Any]]]:
        """Return about ``most`` points of each curve from ``start`` to ``end`` (Unix seconds), as columns."""
        found: dict[str, dict[str, list[Any]]] = {}
        for name in sorted(self._of):
            points = self._of[name]
            first = bisect_left(points, start, key=lambda p: p.t)
            last = bisect_right(points, end, key=lambda p: p.t)
            shown = points[first:last][:: -max(1, (last - first) // most)][::-1]  # the newest one among them
            if shown:
                found[name] = {
                    "t": [p.t for p in shown],
                    "step": [p.step for p in shown],
                    "value": [p.value for p in shown],
                }
        return found
