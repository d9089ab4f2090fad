"""Units per step, the time of a unit, and curves of the loss: figures from the commits of a run. Pure.

A row is a commit as a replica logged it (commits.jsonl). Spans are in seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ft_hsdp.bench.jobs import Kill, gone

Row = Mapping[str, Any]


def contributes(row: Row) -> bool:
    """Return whether the replica that logged a commit contributed to it."""
    return bool(row["role"] == "contribute")


def micro_batches(row: Row, replica: int, ranks: int) -> int:
    """Return how many micro-batches each rank of a replica trained in a committed step."""
    return sum(int(c["units"]) for c in row["contributions"] if c["replica"] == replica) // ranks


def constancy(rows: Sequence[Row], victim: int) -> dict[str, Any]:
    """Return which steps of a run had another number of units than wanted.

    Args:
        rows: The canonical commits by step; the victim is away in one series of them.
        victim: The replica that was killed once.

    Returns:
        "steps": how many were looked at, from the first one to which all contributed on; "wanted" units of a step;
        "away": steps without the victim; "at_loss": units of the first of those; "others": steps but that one
        whose units were not the wanted ones; "back": whether the victim contributed again.
    """
    begin = next(n for n, row in enumerate(rows) if len(row["contributors"]) == row["total"])
    seen = rows[begin:]
    away = [row for row in seen if victim not in row["contributors"]]
    lost = away[0]["step"] if away else None
    return {
        "steps": len(seen),
        "wanted": seen[0]["units_wanted"],
        "away": len(away),
        "at_loss": away[0]["units"] if away else None,
        "others": [row["step"] for row in seen if row["units"] != row["units_wanted"] and row["step"] != lost],
        "back": bool(away) and seen[-1]["step"] > away[-1]["step"],
    }


def unit_seconds(rows: Iterable[Row], replica: int, ranks: int) -> list[float]:
    """Return the time of each step to which a replica contributed, by the micro-batches that it trained."""
    return [row["step_s"] / micro_batches(row, replica, ranks) for row in rows if contributes(row)]


def micro_batch_s(fed: Iterable[Row]) -> float:
    """Return the median time from one micro-batch to the next one of the same step, from lines of fed.jsonl."""
    times: list[float] = []
    before: Row | None = None
    for line in fed:
        if before is not None and (line["step"], line["incarnation"]) == (before["step"], before["incarnation"]):
            times.append(line["t"] - before["t"])
        before = line
    return statistics.median(times)


def beyond(kill: Kill, rows: Mapping[int, Sequence[Row]], micro_s: float, ranks: int) -> float | None:
    """Return the time of the step in which a replica was lost, beyond the units' own; of the last survivor.

    It counts from the commit before the kill to the first one without the victim. Of that goes the time of the
    micro-batches that the survivor trained, and what an undisturbed step takes besides its micro-batches. What is
    left is detection, the new grant, the new ring, and every wait before the missing units are trained.

    Args:
        kill: The kill.
        rows: The commits that each replica logged.
        micro_s: Of a micro-batch.
        ranks: Of a replica.

    Returns:
        Seconds; None where a survivor logged too little.
    """
    found = []
    for survivor, mine in rows.items():
        if survivor == kill.replica:
            continue
        before = [row for row in mine if row["t"] <= kill.t]
        after = next((row for row in mine if row["t"] > kill.t and gone(row, kill)), None)
        if not before or after is None:
            return None
        hit = [row for row in mine if before[-1]["step"] < row["step"] <= after["step"]]
        own = sum(micro_batches(row, survivor, ranks) for row in hit) * micro_s
        found.append(after["t"] - before[-1]["t"] - own - len(hit) * besides(mine, survivor, micro_s, ranks))
    return max(found)


def besides(rows: Sequence[Row], replica: int, micro_s: float, ranks: int) -> float:
    """Return the median time that a step to which all contribute takes besides the replica's micro-batches."""
    whole = [row for row in rows if len(row["contributors"]) == row["total"]]
    return statistics.median(row["step_s"] - micro_batches(row, replica, ranks) * micro_s for row in whole)


def curve(losses: Sequence[float], block: int) -> list[float]:
    """Return the means of as many losses each, in their order; an incomplete block at the end is left out."""
    return [statistics.fmean(losses[n : n + block]) for n in range(0, len(losses) - block + 1, block)]


def outside(curve_: Sequence[float], band: Sequence[Sequence[float]]) -> list[float]:
    """Return for each point of a curve how far it lies outside of what the curves of ``band`` span; 0 inside."""
    limits = [(min(points), max(points)) for points in zip(*band, strict=True)]
    return [max(low - y, y - high, 0.0) for y, (low, high) in zip(curve_, limits, strict=True)]
