"""Spans of time as figures: what happens as a rule, and what happens once in a hundred times.

From the logs of a run with kills to figures. Pure. Times are in Unix seconds, spans in seconds.

How a killed replica came back, by what it logged itself. Pure. Times are in Unix seconds, spans in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_hsdp.bench.results import milliseconds


def span(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and greatest, in milliseconds, and how many there were."""
    return {
        "p50_ms": milliseconds(statistics.median(seconds)),
        "p99_ms": milliseconds(quantile(seconds, 0.99)),
        "max_ms": milliseconds(max(seconds)),
        "count": len(seconds),
    }


Row = Mapping[str, Any]
"""A commit or an event, as it was logged."""

PHASES = ("detect", "quorum", "reconnect", "compute", "ring", "commit")


@dataclass(frozen=True, slots=True)
class Kill:
    """Rank `rank` of `replica`'s `incarnation` got SIGKILL (or SIGSTOP) at `t`."""

    t: float
    replica: int
    rank: int
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Stall:
    """What a kill cost the survivors.

    next_s: from the kill to the last survivor's first commit without the victim; less_one_s: the same less one
    fault-free step; stall_s: how much longer it took from the commit before the kill than so many fault-free
    steps: it counts all of the step that was hit, not only its rest. last: the survivor that was last.
    """

    next_s: float
    less_one_s: float
    stall_s: float
    last: int


@dataclass(frozen=True, slots=True)
class Return:
    """How the victim came back.

    rejoin_s: from the kill to its first contribution; waited_s: the survivors' exposed waits from its check-in on,
    beyond those of as many fault-free steps.
    """

    rejoin_s: float
    waited_s: float


def stall(
    kill: Kill, rows: Mapping[int, Sequence[Row]], gone: Callable[[Row], bool], step_s: float
) -> Stall | None:
    """What `kill` cost those whose `rows` these are; None where one of them logged too little.

    gone: whether a commit is one without the victim.
    """
    ends: dict[int, Stall] = {}
    for survivor, all_of_them in rows.items():
        before = [row for row in all_of_them if row["t"] <= kill.t]
        after = next((row for row in all_of_them if row["t"] > kill.t and gone(row)), None)
        if not before or after is None:
            return None
        steps = after["step"] - before[-1]["step"]
        next_s = after["t"] - kill.t
        ends[survivor] = Stall(next_s, next_s - step_s, after["t"] - before[-1]["t"] - steps * step_s, survivor)
    return max(ends.values(), key=lambda each: each.next_s, default=None)


def phases(kill: Kill, last: int, rows: Sequence[Row], events: Sequence[Row]) -> dict[str, float] | None:
    """Where the time went until `last`, the slowest survivor, committed; they add up to `Stall.next_s`.

    detect: until some survivor's ring broke; quorum: until the new grant; reconnect: until the new ring is formed;
    compute: what was left of forward and backward then; ring; commit. None where the step that was hit needed no
    second ring.
    """
    after = next((r for r in rows if r["t"] > kill.t and kill.replica not in r["contributors"]), None)
    if after is None:
        return None
    within = [e for e in events if kill.t <= e["t"] <= after["t"]]
    own = [e for e in within if e.get("replica") == last]
    broke = [e["t"] for e in within if e["event"] == "RingBroken" and e.get("replica") != kill.replica]
    granted = [e["t"] for e in own if e["event"] == "GrantAdopted"]
    formed = [e["t"] for e in own if e["event"] == "RingConnected" and e.get("epoch") == after["epoch"]]
    again = any(e["event"] == "StepRetried" for e in own)
    if not (broke and granted and formed and again and broke[0] <= granted[-1] <= formed[-1]):
        return None
    waits = after["waits"]
    reduced = after["t"] - waits["commit"]
    computed = max(reduced - waits["ftar"], formed[-1])
    return {
        "detect": broke[0] - kill.t,
        "quorum": granted[-1] - broke[0],
        "reconnect": formed[-1] - granted[-1],
        "compute": computed - formed[-1],
        "ring": reduced - computed,
        "commit": float(waits["commit"]),
    }


def repeated(found: Mapping[str, float]) -> float | None:
    """From the new grant to the commit, where forward and backward were over by then; None where they were not."""
    if found["compute"] > 0:
        return None
    return found["reconnect"] + found["ring"] + found["commit"]


def came_back(
    kill: Kill, rows: Mapping[int, Sequence[Row]], events: Sequence[Row], usual_wait_s: float
) -> Return | None:
    """How the victim came back; None where it did not. rows: of the survivors; usual_wait_s: see `exposed`."""
    checked = [
        e["t"]
        for e in events
        if e["event"] == "CheckedIn" and e.get("replica") == kill.replica and e["t"] > kill.t
    ]
    if not checked:
        return None
    first, waits = [], []
    for each in rows.values():
        back = [r for r in each if r["t"] > checked[0] and kill.replica in r["contributors"]]
        if not back:
            return None
        window = [r for r in each if checked[0] < r["t"] <= back[0]["t"]]
        first.append(back[0]["t"])
        waits.append(sum(map(exposed, window)) - len(window) * usual_wait_s)
    return Return(min(first) - kill.t, statistics.fmean(waits))


def exposed(row: Row) -> float:
    """Seconds that a replica waited in a step with its own work done."""
    return float(sum(row["waits"].values()))


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


MARKS: Mapping[str, str] = {
    "exit": "ReplicaExited",
    "start": "ReplicaStarted",
    "warm-up": "ReplicaWarmed",
    "check-in": "CheckedIn",
    "grant": "GrantAdopted",
    "fetch": "FetchCompleted",
}
"""The event that ends each phase of a return; the last phase, LAST, ends with the commit."""

LAST = "step"


@dataclass(frozen=True, slots=True)
class Back:
    """From the kill to the victim's own next commit, and to its next contribution.

    less_one_s: to the commit, less one fault-free step; phases: add up to commit_s; how: what the supervisor says
    of the start, "" where it says nothing.
    """

    commit_s: float
    less_one_s: float
    contribute_s: float
    phases: Mapping[str, float]
    how: str = ""


def back(
    kill: Kill,
    rows: Sequence[Row],
    events: Sequence[Row],
    step_s: float,
    contributes: Callable[[Row], bool],
    marks: Mapping[str, str] = MARKS,
) -> Back | None:
    """How the victim of `kill` came back; None where it did not. rows: its own commits; events: of everybody."""
    after = [r for r in rows if r["t"] > kill.t and r["incarnation"] != kill.incarnation]
    full = next((r for r in after if contributes(r)), None)
    if full is None:
        return None
    first = after[0]["t"]
    own = [e for e in events if e.get("replica") == kill.replica and kill.t < e["t"] <= first]
    ends = {name: max((e["t"] for e in own if e["event"] == event), default=0.0) for name, event in marks.items()}
    hows = [e["how"] for e in own if "how" in e]
    return Back(
        first - kill.t,
        first - kill.t - step_s,
        full["t"] - kill.t,
        return_phases(kill.t, ends, first),
        hows[-1] if hows else "",
    )


def return_phases(start: float, ends: Mapping[str, float], end: float) -> dict[str, float]:
    """How long each phase lasted: from the end of those before it to its own. One that was over by then, or that
    nobody saw, took no time."""
    found, now = {}, start
    for name, t in ends.items():
        found[name] = max(0.0, t - now)
        now = max(now, t)
    return {**found, LAST: end - now}
