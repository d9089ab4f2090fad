"""The goals of the benches, and how what was seen stands to them; a result's head and its end.

The functions that are named for a bench take a result of it and yield every goal for which there is a figure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ft_hsdp.bench.results import KIB, MIB, ProgressLog, machine, now, ratio, size_name, versions

BUSY = 1.0  # load from which on others have disturbed

LARGE = (64 * MIB, 256 * MIB)
SMALL = 64 * KIB  # up to here latency counts
SPEED: tuple[tuple[str, str, Mapping[int, float]], ...] = (  # contender, anchor, times as fast by members at LARGE
    ("tcp", "gloo", {2: 2.2, 4: 1.5}),
    ("tcp", "torchft", {2: 2.2, 4: 1.5}),
    ("shm", "gloo", {2: 5.0, 4: 2.5}),
    ("c10d", "gloo", {2: 1.0, 4: 1.0}),
)
LATENCY = 2.0

QUORUM_TIMES, QUORUM_AT = 1.25, (12, 64)
QUORUM_KINDS = {"same": "a round", "new": "a round that makes an epoch durable"}

RAW_SHARE, LARGE_TIMES, SMALL_TIMES, FETCH_MEMORY = 0.8, 1.3, 3.0, 1.1
TORCHFT_FETCHES = ("torchft", "torchft-4")

NEXT_COMMIT = {"less_one": "SIGKILL to next commit - 1 step", "stall": "all of the step hit - 1 step"}
NEXT_P50_MS, NEXT_P99_MS = 100.0, 300.0
STOP_P50_MS, STOP_P99_MS = 1200.0, 2000.0

STEADY = 1.02
SNAPSHOT = {"computing": 1.10, "waiting": 1.02}


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


Row = Mapping[str, Any]
Verdicts = Iterator[GoalVerdict]


def least(text: str, row: Row, limit: float, seen: float) -> GoalVerdict:
    """Return the verdict on a goal that is kept if ``seen`` is at least ``limit``."""
    return GoalVerdict(text, _members(row), row.get("bytes"), ">=", limit, seen, seen >= limit)


def most(text: str, row: Row, limit: float, seen: float) -> GoalVerdict:
    """Return the verdict on a goal that is kept if ``seen`` is at most ``limit``."""
    return GoalVerdict(text, _members(row), row.get("bytes"), "<=", limit, seen, seen <= limit)


def _members(row: Row) -> int | None:
    return row.get("members", row.get("replicas"))


def times_as_fast(row: Row, name: str, other: str) -> float:
    """Return how many times as fast ``name`` is as ``other``: a ratio of medians."""
    return ratio(row["contenders"][other]["p50_ms"], row["contenders"][name]["p50_ms"])


def ftar(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench ftar`."""
    for row in result.get("bandwidth", ()):
        yield from _bandwidth(row)


def _bandwidth(row: Row) -> Verdicts:
    times = row["times_as_fast"]
    for contender, anchor, limits in SPEED:
        limit = limits.get(row["members"])
        if limit is not None and row["bytes"] in LARGE and anchor in times.get(contender, {}):
            yield least(f"{contender} vs {anchor}, times as fast", row, limit, times[contender][anchor])
    if row["bytes"] <= SMALL and "gloo" in row["contenders"]:
        for name in ("tcp", "shm", "c10d"):
            if name in row["contenders"]:
                yield most(f"{name} vs gloo, times the latency", row, LATENCY, times_as_fast(row, "gloo", name))


def quorum(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench quorum`."""
    for row in result["rounds"]:
        if row["members"] in QUORUM_AT:
            for kind, text in QUORUM_KINDS.items():
                yield most(f"{text}, times torchft's", row, QUORUM_TIMES, times_as_long(row, kind))


def times_as_long(row: Row, kind: str) -> float:
    """Return how many times as long as torchft's a round takes, by medians."""
    return ratio(row["rounds"][kind]["p50_ms"], row["rounds"]["torchft"]["p50_ms"])


def fetch(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench fetch`."""
    for row in result["large"]:
        yield least("fetch, share of bare sockets' speed", row, RAW_SHARE, times_as_fast(row, "fetch", "raw"))
        yield from _beside_torchft(row, "fetch", LARGE_TIMES)
        seen = row["memory"]["fetch"]["times_state"]
        yield most("fetch: memory of the receiver, times the state", row, FETCH_MEMORY, seen)
    for row in result["small"]:
        yield from _beside_torchft(row, "transport", SMALL_TIMES)


def _beside_torchft(row: Row, name: str, limit: float) -> Verdicts:
    """Compare with the best setting of torchft."""
    peers = [peer for peer in TORCHFT_FETCHES if peer in row["contenders"]]
    if peers and name in row["contenders"]:
        best = min(peers, key=lambda peer: row["contenders"][peer]["p50_ms"])
        yield least(f"{name} vs torchft, times as fast", row, limit, times_as_fast(row, name, best))


def recovery(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench recovery`."""
    for row in result.get("kill", ()):
        for key, text in NEXT_COMMIT.items():
            yield from _quantiles(text, row, row[key], NEXT_P50_MS, NEXT_P99_MS)
    for row in result.get("stop", ()):
        yield from _quantiles("SIGSTOP to next commit - 1 step", row, row["less_one"], STOP_P50_MS, STOP_P99_MS)


def _quantiles(text: str, row: Row, span: Mapping[str, float], p50_ms: float, p99_ms: float) -> Verdicts:
    yield most(f"{text}, p50 ms", row, p50_ms, span["p50_ms"])
    yield most(f"{text}, p99 ms", row, p99_ms, span["p99_ms"])


def overhead(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench overhead`."""
    for row in result.get("steady", ()):
        for name, times in row["times"].items():
            if name.startswith("ft_hsdp"):
                yield most(f"{name}: a step, times HSDP's", row, STEADY, times["ratio"])
    for row in result.get("snapshot", ()):
        text = f"snapshot each step, {row['step']}: times as long"
        yield most(text, row, SNAPSHOT[row["step"]], row["times"]["with"]["ratio"])


def begin_result(bench: str, log: ProgressLog) -> tuple[dict[str, Any], float]:
    """Return a result without figures, and when it was begun; notes if the machine has other work."""
    where = machine()
    if (load := where["load_1min_before"]) > BUSY:
        log.note(f"the machine was busy: a load of {load:g} before; read nothing into these figures")
    return {"bench": bench, "date": now(), "machine": where, "versions": versions()}, time.monotonic()


def finish_result(result: dict[str, Any], goals: Verdicts, log: ProgressLog, started: float) -> dict[str, Any]:
    """Return the result with its goals, notes and duration: ready for JSON."""
    result["goals"] = [asdict(verdict) for verdict in goals]
    result["notes"] = log.notes
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def where(verdict: GoalVerdict) -> str:
    """Return the ring and the message that a verdict is about."""
    ring = None if verdict.members is None else f"N={verdict.members}"
    size = None if verdict.bytes is None else size_name(verdict.bytes)
    return ", ".join(filter(None, (ring, size)))
