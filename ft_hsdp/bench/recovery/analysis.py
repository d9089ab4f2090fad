"""What a kill cost the others, and how the victim came back: figures from the logs of a run with kills. Pure.

`ft_hsdp.analysis` finds who noticed a kill when, and when the victim started, checked in and contributed again, as
for summary.json and the page. Here is what only a bench asks: what each survivor waited for. Times are in Unix
seconds, spans in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_hsdp.analysis.commits import canonical
from ft_hsdp.analysis.failures import Failure, fold
from ft_hsdp.bench.results import milliseconds

Row = Mapping[str, Any]
"""A commit or an event, as it was logged."""

PHASES = ("detect", "quorum", "reconnect", "compute", "ring", "commit")


def span(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and greatest in milliseconds, and how many there were."""
    return {
        "p50_ms": milliseconds(statistics.median(seconds)),
        "p99_ms": milliseconds(quantile(seconds, 0.99)),
        "max_ms": milliseconds(max(seconds)),
        "count": len(seconds),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank of a replica's incarnation got SIGKILL or SIGSTOP at ``t``."""

    t: float
    replica: int
    rank: int
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Stall:
    """What a kill cost the survivors."""

    next_s: float  # from the kill to the last survivor's first commit without the victim
    less_one_s: float  # the same less one fault-free step
    stall_s: float  # from the commit before the kill to that commit, less as many fault-free steps
    last: int  # the survivor that was last


def gone(row: Row, kill: Kill) -> bool:
    """Return whether a commit is one without the victim of ``kill``."""
    return kill.replica not in row["contributors"]


def contributes(row: Row) -> bool:
    """Return whether the replica that logged a commit contributed to it."""
    return bool(row["role"] == "contribute")


def stall(kill: Kill, rows: Mapping[int, Sequence[Row]], step_s: float) -> Stall | None:
    """Return what ``kill`` cost the survivors; None where one of them logged too little.

    Args:
        kill: the kill.
        rows: the commits that each survivor logged.
        step_s: a fault-free step.
    """
    ends: list[Stall] = []
    for survivor, mine in rows.items():
        before = [row for row in mine if row["t"] <= kill.t]
        after = next((row for row in mine if row["t"] > kill.t and gone(row, kill)), None)
        if not before or after is None:
            return None
        next_s, steps = after["t"] - kill.t, after["step"] - before[-1]["step"]
        ends.append(Stall(next_s, next_s - step_s, after["t"] - before[-1]["t"] - steps * step_s, survivor))
    return max(ends, key=lambda each: each.next_s, default=None)


def stalls(kills: Iterable[Kill], rows: Mapping[int, Sequence[Row]], step_s: float) -> list[Stall | None]:
    """Return what each kill cost the survivors; ``rows``: the commits that each replica logged."""
    return [
        stall(kill, {replica: each for replica, each in rows.items() if replica != kill.replica}, step_s)
        for kill in kills
    ]


def costs(found: Sequence[Stall], step_s: float) -> dict[str, Any]:
    """Return the figures of some stalls."""
    return {
        "step_ms": milliseconds(step_s),
        "next": span([each.next_s for each in found]),
        "less_one": span([each.less_one_s for each in found]),
        "stall": span([each.stall_s for each in found]),
    }


def failures_of(rows: Mapping[int, Iterable[dict[str, Any]]], events: Iterable[Row]) -> dict[str, Failure]:
    """Return the failures of a run by incarnation; ``rows``: the commits that each replica logged."""
    commits = canonical(rows.values(), ())
    return {failure.life.incarnation: failure for failure in fold(len(rows), events, commits).all}


def phases(
    kill: Kill, failure: Failure, last: int, rows: Sequence[Row], events: Iterable[Row]
) -> dict[str, float] | None:
    """Return where the time went until the slowest survivor committed; the phases add up to `Stall.next_s`.

    detect: until another replica or the lighthouse noticed; quorum: until the new grant; reconnect: until the new
    ring is formed; compute: what was left of forward and backward then; ring; commit. None where the step that was
    hit needed no second ring.

    Args:
        kill: the kill.
        failure: what the analysis of the run says of it.
        last: the slowest survivor.
        rows: the commits that it logged.
        events: all events of the run.
    """
    after = next((r for r in rows if r["t"] > kill.t and gone(r, kill)), None)
    if after is None or failure.noticed is None:
        return None
    own = [e for e in events if e.get("replica") == last and kill.t <= e["t"] <= after["t"]]
    granted = [e["t"] for e in own if e["event"] == "GrantAdopted"]
    formed = [e["t"] for e in own if e["event"] == "RingConnected" and e.get("epoch") == after["epoch"]]
    again = any(e["event"] == "StepRetried" for e in own)
    noticed = max(kill.t, failure.noticed)
    if not (granted and formed and again and noticed <= granted[-1] <= formed[-1]):
        return None
    waits = after["waits"]
    reduced = after["t"] - waits["commit"]
    computed = max(reduced - waits["ftar"], formed[-1])
    return {
        "detect": noticed - kill.t,
        "quorum": granted[-1] - noticed,
        "reconnect": formed[-1] - granted[-1],
        "compute": computed - formed[-1],
        "ring": reduced - computed,
        "commit": float(waits["commit"]),
    }


def repeated(found: Mapping[str, float]) -> float | None:
    """Return the time from the new grant to the commit if forward and backward were over by then, else None."""
    if found["compute"] > 0:
        return None
    return found["reconnect"] + found["ring"] + found["commit"]


def exposed(row: Row) -> float:
    """Return the seconds that a replica waited in a step with its own work done."""
    return float(sum(row["waits"].values()))


@dataclass(frozen=True, slots=True)
class Return:
    """How the victim of a kill came back, as the survivors see it."""

    rejoin_s: float  # from the kill to its first contribution
    waited_s: float  # the survivors' exposed waits from its check-in on, beyond those of as many fault-free steps


def came_back(
    kill: Kill, failure: Failure, rows: Mapping[int, Sequence[Row]], usual_wait_s: float
) -> Return | None:
    """Return how the victim came back; None where it did not.

    Args:
        kill: the kill.
        failure: what the analysis of the run says of it.
        rows: the commits that each survivor logged.
        usual_wait_s: `exposed` of a fault-free step.
    """
    since = failure.next.checked_in if failure.next is not None else None
    if since is None:
        return None
    ends, waits = [], []
    for mine in rows.values():
        later = [row for row in mine if row["t"] > since]
        at = next((n for n, row in enumerate(later) if kill.replica in row["contributors"]), None)
        if at is None:
            return None
        ends.append(later[at]["t"])
        waits.append(sum(map(exposed, later[: at + 1])) - (at + 1) * usual_wait_s)
    return Return(min(ends) - kill.t, statistics.fmean(waits))
