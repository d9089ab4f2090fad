"""`trace`: a run as a file that ui.perfetto.dev and chrome://tracing open. Pure, except `write`.

The trace has a process for each replica: a thread with its steps and what they waited for, one with its
incarnations, and one for each rank with its events. A process for the job has failures and epochs as marks, and
the loss, the number of healthy replicas and the units of each step as counters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_hsdp.analysis.commits import canonical
from ft_hsdp.analysis.incarnations import incarnations
from ft_hsdp.errors import ConfigError
from ft_hsdp.event_table import tell
from ft_hsdp.jsonl import clear_way, finite
from ft_hsdp.launch.run.directory import Row, RunDir, read_jsonl
from ft_hsdp.launch.run.recorder import events_of, finals_of

JOB = 1  # pid of the job's process; to Perfetto pid 0 is the idle process
ALL, OTHERS = 1, 2  # threads of the job: marks across all processes, and events of no replica
FIRST = 10  # pid of the process of replica 0
STEPS, INCARNATIONS, RANKS = 1, 2, 10  # threads of a replica; that of rank r is RANKS + r
# Causes of waiting, in the order in which they come at the end of a step.
WAITED = ("quorum", "ftar", "snapshot", "copies", "commit")
ENDED = ("done", "stopped")  # kinds of an incarnation's end that are no failure
MARKS = (
    "EpochGranted",
    "FailureInjected",
    "FailureLifted",
    "ReplicaLost",
    "LighthouseExited",
)

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Track:
    """A thread of a process of the trace."""

    pid: int
    tid: int


def write(run: RunDir, out: Path | None = None) -> Path:
    """Write the trace of `run` to `out`, or to trace.json in its folder, and return the path.

    Raises:
        ConfigError: Nothing is recorded, or the file cannot be written.
    """
    replicas = range(1 + max(run.replicas(), default=-1))
    commits = {n: read_jsonl(run.commits(n)) for n in replicas}
    events = events_of(run)
    if not events and not any(commits.values()):
        raise ConfigError("run", str(run.path), "a run that has recorded something")
    merged = [row for row in read_jsonl(run.metrics) if "logged" not in row]
    steps = merged or canonical(commits.values(), finals_of(run).values())
    target = out or run.path / "trace.json"
    try:
        if out is None:
            clear_way(target)
        target.write_text(json.dumps(trace(run.name, events, commits, steps), allow_nan=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError("OUT", str(target), f"a file that can be written ({error.strerror})") from None
    return target


def trace(name: str, events: Sequence[Row], commits: dict[int, list[Row]], canonical: Sequence[Row]) -> Event:
    """Return the trace as a JSON document. Its times are microseconds since the first time in the rows.

    Args:
        events: The events of all processes; times in rows are Unix seconds.
    """
    times = [
        row["t"] - (row.get("step_s") or 0.0) for rows in (events, *commits.values(), canonical) for row in rows
    ]
    clock = TraceClock(min(times, default=0.0))
    end = max((clock.at(row["t"]) for rows in (events, *commits.values()) for row in rows), default=0)
    shown: list[Event] = []
    for replica in sorted({*commits, *(e["replica"] for e in events if isinstance(e.get("replica"), int))}):
        mine = [e for e in events if e.get("replica") == replica]
        pid = FIRST + replica
        shown += _steps(clock, Track(pid, STEPS), commits.get(replica, []))
        shown += _incarnations(clock, Track(pid, INCARNATIONS), mine, end)
        shown += _rank_events(clock, pid, mine)
    shown += _marks(clock, events)
    others = [e for e in events if not isinstance(e.get("replica"), int)]
    shown += [_instant(Track(JOB, OTHERS), e["event"], clock.at(e["t"]), "t", _facts(e)) for e in others]
    shown += _counters(clock, canonical)
    shown.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
    return {"traceEvents": [*_names(name, shown), *shown], "displayTimeUnit": "ms"}


@dataclass(frozen=True, slots=True)
class TraceClock:
    """Converts Unix seconds to whole microseconds since ``zero``."""

    zero: float  # Unix seconds

    def at(self, t: float) -> int:
        """Return the time stamp of ``t``; 0 for an earlier time than ``zero``."""
        return max(0, round((t - self.zero) * 1e6))


def _steps(clock: TraceClock, track: Track, rows: Iterable[Row]) -> Iterator[Event]:
    """Yield a slice for each step, from commit to commit, and at its end slices of what it waited for."""
    free = 0
    for row in sorted(rows, key=lambda row: row["t"]):
        end = clock.at(row["t"])
        start = max(free, clock.at(row["t"] - row["step_s"]))
        if end <= start:
            continue
        keys = (
            "epoch",
            "attempt",
            "loss",
            "lr",
            "contributors",
            "units",
            "units_wanted",
            "tokens",
            "ftar_bytes",
            "ftar_s",
            "role",
        )
        yield _slice(track, f"step {row['step']}", start, end, {key: row.get(key) for key in keys})
        waits = row.get("waits") or {}
        lengths = [_microseconds(waits.get(cause)) for cause in WAITED]
        at = end - sum(lengths)
        for cause, length in zip(WAITED, lengths, strict=True):
            since, until = max(start, at), max(start, at + length)
            if until > since:
                yield _slice(track, cause, since, until, {"seconds": waits[cause]})
            at += length
        free = end


def _incarnations(clock: TraceClock, track: Track, events: Iterable[Row], end: int) -> Iterator[Event]:
    """Yield a slice for each incarnation, and in it a slice of the time until it checked in."""
    found = [each for each in incarnations(events).values() if each.began is not None]
    free = 0
    for each in sorted(found, key=lambda each: each.began or 0.0):
        start = max(free, clock.at(each.began or 0.0))
        until = end if each.exited is None else clock.at(each.exited)
        if until <= start:
            continue
        state = "runs" if each.exited is None else "exited"
        yield _slice(track, each.incarnation, start, until, {"ended": each.kind or state})
        ready = 0 if each.checked_in is None else clock.at(each.checked_in)
        if start < ready <= until:
            yield _slice(track, "start", start, ready, {})
        free = until


def _rank_events(clock: TraceClock, pid: int, events: Iterable[Row]) -> Iterator[Event]:
    """Yield each rank's events on its thread; a fetch has a length."""
    free: dict[int, int] = {}
    for event in sorted(events, key=lambda event: event["t"]):
        rank = event.get("rank")
        track = Track(pid, RANKS + rank if isinstance(rank, int) else INCARNATIONS)
        at = clock.at(event["t"])
        if event["event"] == "FetchCompleted" and track.tid != INCARNATIONS:
            start = max(free.get(track.tid, 0), clock.at(event["t"] - (event.get("seconds") or 0.0)))
            if at > start:
                yield _slice(track, "fetch", start, at, _facts(event))
                free[track.tid] = at
                continue
        yield _instant(track, event["event"], at, "t", _facts(event))


def _marks(clock: TraceClock, events: Iterable[Row]) -> Iterator[Event]:
    """Yield marks across all threads for the events that concern the whole job."""
    for event in events:
        failed = event["event"] == "ReplicaExited" and event.get("kind") not in ENDED
        if failed or event["event"] in MARKS:
            yield _instant(Track(JOB, ALL), tell(event, reason=False), clock.at(event["t"]), "g", _facts(event))


def _counters(clock: TraceClock, rows: Iterable[Row]) -> Iterator[Event]:
    for row in rows:
        healthy = len(row.get("contributors") or ())
        values = {"loss": row.get("loss"), "healthy": healthy, "units": row.get("units")}
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                counter = {"ph": "C", "name": name, "pid": JOB, "tid": ALL, "ts": clock.at(row["t"])}
                yield {**counter, "args": {name: value}}


def _names(name: str, shown: Iterable[Event]) -> Iterator[Event]:
    """Yield the names of processes and threads, in the order in which they are shown."""
    tracks = sorted({(e["pid"], e["tid"]) for e in shown})
    for pid in sorted({pid for pid, _ in tracks}):
        yield _named("process_name", pid, 0, name=name if pid == JOB else f"replica {pid - FIRST}")
        yield _named("process_sort_index", pid, 0, sort_index=pid)
    for pid, tid in tracks:
        threads = {ALL: "job", OTHERS: "lighthouse"} if pid == JOB else {STEPS: "steps", INCARNATIONS: "lives"}
        yield _named("thread_name", pid, tid, name=threads.get(tid, f"rank {tid - RANKS}"))
        yield _named("thread_sort_index", pid, tid, sort_index=tid)


def _named(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(track: Track, name: str, start: int, end: int, args: Row) -> Event:
    event = {"ph": "X", "name": name, "pid": track.pid, "tid": track.tid, "ts": start, "dur": end - start}
    return {**event, "args": finite(args)}


def _instant(track: Track, name: str, at: int, scope: str, args: Row) -> Event:
    event = {"ph": "i", "name": name, "pid": track.pid, "tid": track.tid, "ts": at, "s": scope}
    return {**event, "args": finite(args)}


def _facts(event: Row) -> Row:
    """Return the fields of an event without those that its place in the trace shows."""
    return {key: value for key, value in event.items() if key not in ("t", "event", "replica", "rank")}


def _microseconds(seconds: float | None) -> int:
    return round(seconds * 1e6) if seconds and math.isfinite(seconds) and seconds > 0 else 0
