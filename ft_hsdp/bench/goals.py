"""The goals, and how what was seen stands to them.

What every result has: where and with what it was measured, the goals, the notes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ft_hsdp.bench.options import KIB, MIB, ProgressLog, size_name
from ft_hsdp.bench.results import machine, now, ratio, versions

LARGE = (64 * MIB, 256 * MIB)
SMALL = 64 * KIB  # up to here latency counts
SPIN_SHARE = 0.5
RAISE_P50_MS, RAISE_MAX_MS = 50.0, 150.0
RECONFIGURE_MS = 10.0
NEXT_MS = 150.0
LATENCY = 2.0
LINK_COST = 0.6


@dataclass(frozen=True, slots=True)
class Goal:
    """`contender` is at least `times[members]` times as fast as `anchor` at LARGE sizes (ratio of medians)."""

    contender: str
    anchor: str
    times: Mapping[int, float]


SPEED = (
    Goal("tcp", "gloo", {2: 2.2, 4: 1.5}),
    Goal("tcp", "torchft", {2: 2.2, 4: 1.5}),
    Goal("shm", "gloo", {2: 5.0, 4: 2.5}),
    Goal("shm", "openmpi", {2: 2.0, 4: 1.5}),
    Goal("c10d", "gloo", {2: 1.0, 4: 1.0}),
)


@dataclass(frozen=True, slots=True)
class GoalVerdict:
    """One goal beside one figure. limit and seen: with their unit in `text`; met: whether it is kept."""

    text: str
    members: int | None
    bytes: int | None
    bound: str
    limit: float
    seen: float
    met: bool


def verdicts(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[GoalVerdict]:
    """Every goal for which there is a figure; `measured` has the rows of each measure."""
    found: list[GoalVerdict] = []
    for row in measured.get("bandwidth", ()):
        found += _speed(row)
    for row in measured.get("spin", ()):
        if row["contender"] in ("tcp", "shm"):
            text = f"{row['contender']} beside a spinning thread"
            found.append(least(text, row, SPIN_SHARE, row["share_of_idle"]["thread"]))
    for row in measured.get("kill", ()):
        found += _kill(row)
    for row in measured.get("reconfigure", ()):
        if row["members"] == 4 and row["contender"] != "torchft":
            text = f"{row['contender']} reconfigures, {row['change']} order, ms"
            found.append(most(text, row, RECONFIGURE_MS, row["p50_ms"]))
    for row in measured.get("link", ()):
        if row["times_cost"] is not None:
            found.append(most("exchange on a link, times HSDP's cost", row, LINK_COST, row["times_cost"]))
    return found


def _speed(row: Mapping[str, Any]) -> Iterator[GoalVerdict]:
    times = row["times_as_fast"]
    for goal in SPEED:
        limit = goal.times.get(row["members"])
        if limit is not None and row["bytes"] in LARGE and goal.anchor in times.get(goal.contender, {}):
            text = f"{goal.contender} vs {goal.anchor}, times as fast"
            yield least(text, row, limit, times[goal.contender][goal.anchor])
    if row["bytes"] <= SMALL and "gloo" in row["contenders"]:
        gloo = row["contenders"]["gloo"]["p50_ms"]
        for name in ("tcp", "shm", "c10d"):
            if name in row["contenders"]:
                own = row["contenders"][name]["p50_ms"]
                yield most(f"{name} vs gloo, times the latency", row, LATENCY, ratio(own, gloo))


def _kill(row: Mapping[str, Any]) -> Iterator[GoalVerdict]:
    if row["members"] == 8:
        text = f"{row['contender']}: kill to raise"
        yield most(f"{text}, p50 ms", row, RAISE_P50_MS, row["raise"]["p50_ms"])
        yield most(f"{text}, max ms", row, RAISE_MAX_MS, row["raise"]["max_ms"])
    if row["members"] == 4:
        text = f"{row['contender']}: kill to next sum - 1, max ms"
        yield most(text, row, NEXT_MS, row["next_less_one"]["max_ms"])


def least(text: str, row: Mapping[str, Any], limit: float, seen: float) -> GoalVerdict:
    """`seen` is to be at least `limit`."""
    return GoalVerdict(text, row.get("members"), row.get("bytes"), ">=", limit, seen, seen >= limit)


def most(text: str, row: Mapping[str, Any], limit: float, seen: float) -> GoalVerdict:
    """`seen` is to be at most `limit`."""
    return GoalVerdict(text, row.get("members"), row.get("bytes"), "<=", limit, seen, seen <= limit)


def where(verdict: GoalVerdict) -> str:
    """The ring and the message that a verdict is about."""
    ring = None if verdict.members is None else f"N={verdict.members}"
    size = None if verdict.bytes is None else size_name(verdict.bytes)
    return ", ".join(filter(None, (ring, size)))


BUSY = 1.0  # load from which on others have disturbed


def begin_result(name: str, log: ProgressLog) -> tuple[dict[str, Any], float]:
    """A result without figures, and when it was begun; a note if the machine has other work."""
    where = machine()
    if (load := where["load_1min_before"]) > BUSY:
        log.note(f"the machine was busy: a load of {load:g} before; read nothing into these figures")
    return {"bench": name, "date": now(), "machine": where, "versions": versions()}, time.monotonic()


def finish_result(
    result: dict[str, Any], found: Sequence[GoalVerdict], log: ProgressLog, started: float
) -> dict[str, Any]:
    """The result with its goals, notes and duration: ready for JSON."""
    result["goals"] = [asdict(verdict) for verdict in found]
    result["notes"] = log.notes
    result["seconds"] = round(time.monotonic() - started, 1)
    return result
