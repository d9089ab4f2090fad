"""Starts: how long each start of a replica took, part by part. Pure.

A run as a story, for `explain`; and which events a live view shows. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ft_hsdp.launch.run.directory import Row
from ft_hsdp.sentences import fault, tell

PARTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "boot": (("ReplicaStarted",), "ReplicaBooted"),
    "warm": (("ReplicaBooted",), "ReplicaWarmed"),
    "check-in": (("ReplicaWarmed", "ReplicaBooted"), "CheckedIn"),
    "grant": (("CheckedIn",), "GrantAdopted"),
    "fetch": (("FetchStarted",), "FetchCompleted"),
    "first step": (("GrantAdopted",), "FirstStepCommitted"),
    "contributes": (("FirstStepCommitted",), "Rejoined"),
}
"""Each part's name, the event with which it begins (the first of those that there are), and the one that ends it.

The fetch falls into the first step, to which a replica that is behind does not contribute; all others follow one
another.
"""


@dataclass(frozen=True, slots=True)
class IncarnationStart:
    """One incarnation; seconds. `down`: from the failure before it to its start, `back`: to its first commit."""

    replica: int
    incarnation: str
    how: str
    down: float | None
    parts: Mapping[str, float]
    back: float | None


def starts(events: Sequence[Row], failures: Sequence[Row] = ()) -> list[IncarnationStart]:
    """All starts of a run, by time; `failures` as in summary.json."""
    lives: dict[tuple[int, str], dict[str, list[Row]]] = {}
    for event in events:
        replica, incarnation = event.get("replica"), event.get("incarnation")
        if isinstance(replica, int) and isinstance(incarnation, str):
            lives.setdefault((replica, incarnation), {}).setdefault(event["event"], []).append(event)
    found = [
        (min(e["t"] for e in told[name]), replica, incarnation, told)
        for (replica, incarnation), told in lives.items()
        for name in ("ReplicaStarted", "ReplicaBooted")
        if name in told and (name == "ReplicaStarted" or "ReplicaStarted" not in told)
    ]
    failed = {f["incarnation"]: f["t"] for f in failures if "incarnation" in f}
    return [_start(*each, failed.get(_before(each[2]))) for each in sorted(found, key=lambda each: each[0])]


def _start(
    t: float, replica: int, incarnation: str, told: Mapping[str, list[Row]], failed: float | None
) -> IncarnationStart:
    parts = {}
    for name, (begins, end) in PARTS.items():
        begin = next((b for b in begins if b in told), None)
        if begin is not None and end in told:
            times = [e["t"] for e in told[end]]
            over = max(times) if end == "FetchCompleted" else min(times)
            parts[name] = max(0.0, over - min(e["t"] for e in told[begin]))
    how = next((e["how"] for e in told.get("ReplicaStarted", ()) if "how" in e), "")
    commit = next((e["t"] for e in told.get("FirstStepCommitted", ())), None)
    down = None if failed is None else max(0.0, t - failed)
    back = None if commit is None else max(0.0, commit - (t if failed is None else failed))
    return IncarnationStart(replica, incarnation, how, down, parts, back)


def _before(incarnation: str) -> str:
    """The name of the incarnation before; "" before the first."""
    head, _, count = incarnation.rpartition("-")
    return f"{head}-{int(count) - 1}" if count.isdecimal() and int(count) > 0 else ""


def table(found: Sequence[IncarnationStart]) -> list[str]:
    """A line for each start, below a heading."""
    names = ("down", *PARTS, "in all")
    widths = [max(len(name), 6) for name in names]
    wide = max(7, *(len(start.incarnation) for start in found))
    lines = [f"{'seconds of each start':{wide + 14}}  " + "  ".join(map(str.rjust, names, widths)).rstrip()]
    for start in found:
        values = [start.down, *(start.parts.get(name) for name in PARTS), start.back]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        named = f"{start.incarnation:{wide}}  {start.how[:12]:12}"
        lines.append(f"{named}  " + "  ".join(map(str.rjust, cells, widths)))
    return lines


NOTABLE = frozenset(
    {
        "FailureInjected",
        "FailureLifted",
        "RingBroken",
        "ProcessExited",
        "EvictionOrdered",
        "JobScaled",
        "LeaveRequested",
        "ReplicaDrained",
        "ReplicaUndrained",
        "RestartScheduled",
        "ReplicaUnplaced",
        "SupervisorStandsBy",
        "SupervisorLeased",
        "LogCut",
        "LogLinesLost",
        "ReplicaLost",
        "LeftBehind",
        "FetchCompleted",
        "FetchRejected",
        "ForkServerLost",
        "SnapshotCorrupt",
        "StateCorrupt",
        "EpochGranted",
        "ReplicaExcluded",
        "HeadRolledBack",
        "RewindOrdered",
        "EdgeBroken",
        "StoreBehind",
        "LighthouseExited",
        "LighthouseFailed",
        "StoreFailed",
        "StoreRecovered",
        "LighthouseRestarted",
        "LeaseUsed",
        "BatchGivenUp",
        "LighthouseAwaited",
        "LeaseEnded",
        "JobHalted",
        "StateDiverged",
        "StateAgentLost",
        "SnapshotsNotForgotten",
        "StepSkipped",
        "CheckpointFailed",
        "CheckpointMissing",
        "CheckpointWriterLost",
        "CheckpointPassedOver",
        "LighthouseSilent",
        "LighthouseDeposed",
        "LighthouseElected",
    }
)
"""The events that a live view shows."""


def story(events: Iterable[Row], failures: Sequence[Row] = (), lost: Sequence[int] = ()) -> list[str]:
    """A run as lines: every decision with its reason, how long each start took, each failure in one paragraph."""
    ordered = sorted(events, key=lambda e: e["t"])
    if not ordered:
        return ["nothing is recorded"]
    start = ordered[0]["t"]
    lines = [f"{e['t'] - start:9.3f} s  {tell(e)}" for e in ordered]
    started = starts(ordered, failures)
    if started:
        lines += ["", *table(started)]
    for n, failure in enumerate(failures, 1):
        lines += ["", f"failure {n}: {account(failure, start)}"]
    lines += [f"replica {replica} was lost: its restarts were used up" for replica in lost]
    return lines


def account(failure: Row, start: float) -> str:
    """One failure of summary.json in words; `start` is the run's first moment."""
    back = failure["rejoin_s"] if failure.get("back", True) else None
    came = f"contributed again after {back:.2f} s" if back is not None else "did not contribute again"
    seen = failure["detect_s"]
    noticed = f"seen after {seen * 1e3:.0f} ms" if seen is not None else "seen after an unknown time"
    donor = f", with the state of replica {failure['source']}" if failure["source"] else ""
    rank = f" rank {failure['rank']}" if failure["rank"] is not None else ""
    return (
        f"replica {failure['replica']}{rank} {fault(failure['kind'])} at {failure['t'] - start:.3f} s; "
        f"{noticed}; the others lost {failure['stall_s']:.2f} s; "
        f"it {came}{donor}"
    )
