"""Curves of the values that training loops log, in bounded memory. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from ft_hsdp.analysis.commits import MAX_VALUES

KEPT = 4096  # points of a curve, at least; of twice as many every second one is dropped


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
            if name not in self._of and len(self._of) >= MAX_VALUES:
                continue
            points = self._of.setdefault(name, [])
            while points and points[-1].step >= step and points[-1].epoch < epoch:
                points.pop()
            points.append(Value(max(t, points[-1].t if points else t), step, epoch, value))
            if len(points) >= 2 * KEPT:
                del points[1::2]

    def between(self, start: float, end: float, most: int) -> dict[str, dict[str, list[Any]]]:
        """Return about ``most`` points of each curve from ``start`` to ``end`` (Unix seconds), as columns."""
        found: dict[str, dict[str, list[Any]]] = {}
        for name in sorted(self._of):
            points = self._of[name]
            first = bisect_left(points, start, key=lambda p: p.t)
            last = bisect_right(points, end, key=lambda p: p.t)
            shown = points[first : last : max(1, (last - first) // most)]
            if shown:
                found[name] = {
                    "t": [p.t for p in shown],
                    "step": [p.step for p in shown],
                    "value": [p.value for p in shown],
                }
        return found
