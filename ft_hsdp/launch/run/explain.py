"""`explain`: a run in words; and which events the terminal shows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ft_hsdp.analysis.incarnations import PARTS, IncarnationStart, starts
from ft_hsdp.event_table import fault, tell
from ft_hsdp.launch.run.directory import Row


def start_table(found: Sequence[IncarnationStart]) -> list[str]:
    """Return the times of starts as lines: a heading, and a line for each start."""
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


def explain(events: Iterable[Row], failures: Sequence[Row] = (), lost: Sequence[int] = ()) -> list[str]:
    """Return a run as lines: each event with its reason, the times of each start, a paragraph for each failure.

    Args:
        events: All events, in any order.
        failures: The failures of summary.json.
        lost: The replicas that were given up.
    """
    ordered = sorted(events, key=lambda e: e["t"])
    if not ordered:
        return ["nothing is recorded"]
    start = ordered[0]["t"]
    lines = [f"{e['t'] - start:9.3f} s  {tell(e)}" for e in ordered]
    started = starts(ordered, failures)
    if started:
        lines += ["", *start_table(started)]
    for n, failure in enumerate(failures, 1):
        lines += ["", f"failure {n}: {failure_in_words(failure, start)}"]
    lines += [f"replica {replica} was lost: {_why_lost(ordered, replica)}" for replica in lost]
    return lines


def _why_lost(ordered: Sequence[Row], replica: int) -> str:
    """Return why a replica was given up: by its supervisor, or with the job."""
    whys = {e["event"]: e["reason"] for e in ordered if e.get("replica") == replica or e["event"] == "JobGivenUp"}
    return str(whys.get("ReplicaLost") or whys.get("JobGivenUp") or "its restarts were used up")


def failure_in_words(failure: Row, start: float) -> str:
    """Return a failure of summary.json as a sentence; ``start`` is the time of the run's first event."""
    back = failure["rejoin_s"] if failure.get("back", True) else None
    came = f"was back after {back:.2f} s" if back is not None else "did not come back"
    seen = failure["detect_s"]
    noticed = f"seen after {seen * 1e3:.0f} ms" if seen is not None else "seen after an unknown time"
    donor = f", with the state of replica {failure['source']}" if failure["source"] else ""
    rank = f" rank {failure['rank']}" if failure["rank"] is not None else ""
    return (
        f"replica {failure['replica']}{rank} {fault(failure['kind'])} at {failure['t'] - start:.3f} s; "
        f"{noticed}; the others lost {failure['stall_s']:.2f} s; "
        f"it {came}{donor}"
    )
