"""How a killed replica came back, by what it logged itself. Pure. Times are in Unix seconds, spans in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ft_hsdp.bench.recovery.reckon import Kill, Row

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
        phases(kill.t, ends, first),
        hows[-1] if hows else "",
    )


def phases(start: float, ends: Mapping[str, float], end: float) -> dict[str, float]:
    """How long each phase lasted: from the end of those before it to its own. One that was over by then, or that
    nobody saw, took no time."""
    found, now = {}, start
    for name, t in ends.items():
        found[name] = max(0.0, t - now)
        now = max(now, t)
    return {**found, LAST: end - now}
