"""One line per lost incarnation: what it was, how long it took to see, to go on, to come back. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ft_hsdp.launch.incarnation import LEFT
from ft_hsdp.launch.rundir import Row

AFTERMATH_S = 10.0  # a stop that ended longer ago than this did not cause an exit


def failures(rows: Sequence[Row], events: Sequence[Row], typical: float) -> list[Row]:
    """The failures of a run, by time.

    rows: canonical commit rows; events: of all processes; typical: a fault-free step in seconds. Times are
    in Unix seconds. `rejoin_s` runs to the replica's next contribution, or to the end where there was none.
    A replica that leaves because it is told to has not failed, unless that was a failure on purpose.
    """
    lost = [e for e in events if e["event"] == "ReplicaExited" and e["kind"] not in ("done", "stopped")]
    lost = [e for e in lost if e["kind"] != LEFT or _injection(e, events) is not None]
    return sorted((_failure(e, rows, events, typical) for e in lost), key=lambda f: f["t"])


def _failure(exited: Row, rows: Sequence[Row], events: Sequence[Row], typical: float) -> Row:
    replica, incarnation = exited["replica"], exited["incarnation"]
    injected = _injection(exited, events)
    seen = [e["t"] for e in events if _evidence(e, exited, injected["t"] if injected else None)]
    t = injected["t"] if injected else min([*seen, exited["t"]])
    restarts = [e["t"] for e in events if _is(e, "ReplicaStarted", replica) and e["t"] > exited["t"]]
    back = _rejoined(rows, replica, min(restarts, default=None))
    donors = [
        e.get("donor", "")
        for e in events
        if _is(e, "FetchCompleted", replica) and exited["t"] < e["t"] and (back is None or e["t"] <= back)
    ]
    return {
        "t": t,
        "replica": replica,
        "rank": injected["rank"] if injected else exited["rank"],
        "kind": injected["kind"] if injected else exited["kind"],
        "incarnation": incarnation,
        "detect_s": max(0.0, min([*seen, exited["t"]]) - t),
        "stall_s": _stall(rows, t, typical),
        "rejoin_s": max(0.0, (back or max([r["t"] for r in rows[-1:]], default=t)) - t),
        "source": str(donors[-1]) if donors else "",
    }


def _is(e: Row, name: str, replica: int) -> bool:
    return bool(e["event"] == name and e.get("replica") == replica)


def _injection(exited: Row, events: Sequence[Row]) -> Row | None:
    """The injection that ended the incarnation: the last one before its exit, unless it had healed."""
    made = [
        e
        for e in events
        if e["event"] == "FailureInjected"
        and e["incarnation"] == exited["incarnation"]
        and e["t"] <= exited["t"]
        and not _healed(e, exited["t"])
    ]
    return max(made, key=lambda e: e["t"], default=None)


def _healed(injected: Row, t: float) -> bool:
    """Whether a stop that was lifted had been over for long at time `t`."""
    for_s = injected.get("for_s") or 0.0
    return bool(injected["kind"] == "SIGSTOP" and for_s > 0 and t > injected["t"] + for_s + AFTERMATH_S)


def _evidence(e: Row, exited: Row, since: float | None) -> bool:
    """Whether event `e` shows the failure that ended in `exited`."""
    if e["t"] > exited["t"] or (since is not None and e["t"] < since):
        return False
    if e["event"] in ("ProcessExited", "ExitReported"):
        return bool(e.get("incarnation") == exited["incarnation"])
    if e["event"] != "RingBroken" or e.get("replica") == exited["replica"]:
        return False
    # Without an injection only a recent complaint about this very replica is about this failure.
    if since is None:
        return bool(e.get("suspect") == exited["replica"] and e["t"] > exited["t"] - AFTERMATH_S)
    return e.get("suspect") in (None, exited["replica"])


def _stall(rows: Sequence[Row], t: float, typical: float) -> float:
    """How much longer than `typical` the step took during which the failure fell."""
    gap = next((b["t"] - a["t"] for a, b in pairwise(rows) if a["t"] <= t < b["t"]), None)
    return 0.0 if gap is None else max(0.0, float(gap - typical))


def _rejoined(rows: Sequence[Row], replica: int, restarted: float | None) -> float | None:
    """When the first step was committed to which the restarted replica contributed."""
    if restarted is None:
        return None
    times = (row["t"] for row in rows if row["t"] > restarted and replica in row["contributors"])
    return next(times, None)
