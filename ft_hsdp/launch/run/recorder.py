"""Merges what the processes of a run log into events.jsonl, metrics.jsonl and summary.json.

The functions before `Recorder` read a run's logs whether they are merged or not.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ft_hsdp.analysis.commits import (
    CommitMerger,
    SharedValues,
    canonical,
    counted,
    is_logged,
    logged_row,
    metrics_row,
    newest_final,
)
from ft_hsdp.config import Config
from ft_hsdp.jsonl import Lost, Queued, replace_json
from ft_hsdp.launch.run.audit import WINDOW
from ft_hsdp.launch.run.directory import Row, RunDir, Tailer, read_json, read_jsonl
from ft_hsdp.launch.run.summary import RunTally, Summary

FED_BYTES = 64 << 10  # of one replica's fed.jsonl that are read at once

Sink = Callable[[Row], None]


def events_of(run: RunDir) -> list[Row]:
    return sorted(chain.from_iterable(event_streams(run)), key=lambda event: event["t"])


def event_streams(run: RunDir) -> list[Iterator[Row]]:
    """Return the events of each log of a run: of the merged log, or of each process's."""
    logs = [run.events] if run.events.exists() else logs_of(run, 1 + max(run.replicas(), default=-1))
    return [filter(_is_event, Tailer(log).all()) for log in logs]


def _is_event(row: Row) -> bool:
    """Return whether a row is an event: what all events have is of its type."""
    t, named = row.get("t"), all(isinstance(row.get(key, ""), str | None) for key in ("reason", "incarnation"))
    numbered = all(isinstance(row.get(key), int | None) for key in ("replica", "rank"))
    return (
        isinstance(t, int | float)
        and math.isfinite(t)
        and isinstance(row.get("event"), str)
        and named
        and numbered
    )


def commits_of(run: RunDir) -> list[Row]:
    """Return the canonical commits of a run so far, by step, from the logs of its replicas."""
    return canonical((read_jsonl(run.commits(n)) for n in run.replicas()), finals_of(run).values())


def done_by(run: RunDir) -> list[Row]:
    """Return what a run has committed, by time; each commit once, and also what it undid later."""
    rows = [row for n in run.replicas() for row in read_jsonl(run.commits(n)) if counted(row)]
    rows.sort(key=lambda row: (row["role"] != "contribute", row["t"]))
    first = {row["lineage"]: row for row in reversed(rows)}  # of a contributor, if one logged it
    return sorted(first.values(), key=lambda row: float(row["t"]))


def logged_of(run: RunDir) -> list[Row]:
    """Return the values that the loops of a run have logged, by time; those of evaluations once."""
    rows, shared = chain.from_iterable(read_jsonl(run.logged(n)) for n in run.replicas()), SharedValues()
    by_time = sorted(filter(is_logged, rows), key=lambda row: row["t"])
    return [row for row in by_time if shared.before(row) is None]


def finals_of(run: RunDir) -> dict[int, Row]:
    """Return the final.json of each replica that has written one."""
    return {n: final for n in run.replicas() if (final := read_json(run.final(n)))}


def logs_of(run: RunDir, replicas: int) -> list[Path]:
    """Return the paths of all logs of events that are merged; `replicas` is their number."""
    of_one = (run.replica_events, run.injections)
    return [run.lighthouse_events, *(log(n) for n in range(replicas) for log in of_one)]


class FedLogs:
    """The fed.jsonl of all replicas, a piece of each in memory."""

    def __init__(self, run: RunDir, replicas: Iterable[int]) -> None:
        self._logs = {n: Tailer(run.fed(n)) for n in replicas}
        self._to = dict.fromkeys(self._logs, 0)  # the newest step of each that was read
        self._at = time.time()  # when they were read last
        self.dark: deque[tuple[float, float]] = deque()  # times of which one of them lacks lines

    def upto(self, step: float) -> Iterator[tuple[int, Row]]:
        """Yield the next lines up to a step, with their replicas."""
        before_s, self._at = self._at, time.time()
        for replica, log in self._logs.items():
            before = -1
            while self._to[replica] <= step and log.line > before:
                before = log.line
                for line in log.poll(FED_BYTES):
                    self._to[replica] = line.get("step", 0)
                    yield replica, line
                if log.lacks:
                    self.dark.append((before_s, self._at))


class _Fresh(NamedTuple):
    """Rows that a `Recorder` has read and not merged yet."""

    events: list[Row]
    commits: list[Row]
    logged: list[Row]
    fed: list[tuple[int, Row]]  # with their replicas


class Recorder:
    """The only writer of the merged files; `poll` is called until the job has ended, then `finish`."""

    def __init__(
        self, run: RunDir, config: Config, on_commit: Sink, on_event: Sink, *, merge_events: bool = True
    ) -> None:
        """Open the merged files.

        Args:
            on_commit: Called with each canonical commit.
            merge_events: Whether to write events.jsonl.
        """
        self._run = run
        self._config = config
        self._on_commit = on_commit
        self._on_event = on_event
        self._logs = [Tailer(path) for path in logs_of(run, config.slots)]
        self._reading = threading.Lock()
        self._fresh: deque[_Fresh] = deque()
        self._lost: deque[Lost] = deque()  # lines that the merged files lack; their threads append
        self._events_file = Queued(run.events, self._lost.append) if merge_events else None
        self._metrics_file = Queued(run.metrics, self._lost.append)
        self._tally = RunTally(config)
        self._newest_epoch = -1  # of the commits that were published
        self._silent_to = -1  # commits up to this epoch are published again after a rewind: `on_commit` knows them
        self._begin(CommitMerger())

    def _begin(self, merger: CommitMerger) -> None:
        """Read commits and fed units from their first lines on."""
        run, slots = self._run, range(self._config.slots)
        self._merger = merger
        self._commits = [Tailer(run.commits(n)) for n in slots]
        self._fed = FedLogs(run, slots)
        self._logged = [Tailer(run.logged(n)) for n in slots]
        self._shared = SharedValues()
        self._early: list[Row] = []  # logged values of steps that are not published yet
        self._epochs: list[tuple[int, int]] = []  # of published steps: first step of each epoch, and the epoch
        self._published = 0  # the newest step

    @property
    def awaited(self) -> int:
        """Return the number of units that commits list and fed.jsonl does not show so far."""
        return self._tally.audit.awaited

    @property
    def newest(self) -> Row | None:
        """Return the newest commit that any replica logged, confirmed or not."""
        return self._merger.newest

    def emit(self, event: Row) -> None:
        """Record an event of this process, or one from another log."""
        if self._events_file is not None:
            self._events_file.write(event)
        self._tally.event(event)
        self._on_event(event)

    def poll(self) -> bool:
        """Merge what was logged since the last call, at most a piece of each log; return whether there was any."""
        self.read()
        return self.merge()

    def read(self) -> None:
        """Read what was logged since the last call, for `merge`. It blocks on the disk; on any thread."""
        with self._reading:
            events = [event for log in self._logs for event in log.poll() if _is_event(event)]
            commits = [row for log in self._commits for row in log.poll() if counted(row)]
            logged = [row for log in self._logged for row in log.poll() if is_logged(row)]
            # The audit keeps each commit until it has the lines of its units, so this reads as far as commits go.
            fed = list(self._fed.upto(self._tally.audit.steps + WINDOW))
            self._fresh.append(_Fresh(events, commits, logged, fed))

    def merge(self) -> bool:
        """Merge what was read; return whether there was any."""
        while self._fed.dark:
            self._tally.audit.lost(*self._fed.dark.popleft())
        while self._lost:
            self.emit({**self._lost.popleft().event, "source": "supervisor"})
        some = False
        while self._fresh:
            fresh = self._fresh.popleft()
            for event in sorted(fresh.events, key=lambda event: event["t"]):
                self.emit(event)
            self._merger.add(fresh.commits)
            if self._merger.undone:  # all but the events is read again
                self._rewind()
                self._fresh = deque(_Fresh(each.events, [], [], []) for each in self._fresh)
            else:
                self._early += fresh.logged
                self._take_fed(fresh.fed)
            self._publish(self._merger.confirmed())
            some = some or any(fresh)
        return some

    def finish(self, lost: Iterable[int] = ()) -> Summary:
        """Merge the last lines, write summary.json and return it; `lost` are the replicas that were given up.

        summary.json comes last: who waits for it finds the other merged files whole, unless the disk hangs.
        """
        while self.poll():
            pass
        finals = finals_of(self._run)
        last = newest_final(finals.values())
        self._publish(self._merger.finish(last["lineage"] if last else None))
        self._take_fed(self._fed.upto(math.inf))
        self.merge()
        summary = self._tally.summary(finals, lost)
        for file in self._files():
            file.flush()
        try:
            replace_json(self._run.summary, summary)
        except OSError as error:
            unwritten = Lost(self._run.summary.name, 1, time.time(), time.time(), error.strerror or str(error))
            self.emit({**unwritten.event, "source": "supervisor"})
        return summary

    def close(self) -> None:
        for file in self._files():
            file.close()

    def _files(self) -> list[Queued]:
        return [file for file in (self._events_file, self._metrics_file) if file is not None]

    def _publish(self, rows: list[Row]) -> None:
        for row in rows:
            self._metrics_file.write(metrics_row(row))
            self._tally.commit(row)
            if row["epoch"] > self._silent_to:
                self._on_commit(row)
            self._newest_epoch = max(self._newest_epoch, row["epoch"])
            self._published = row["step"]
            if not self._epochs or self._epochs[-1][1] != row["epoch"]:
                self._epochs.append((row["step"], row["epoch"]))
        due = [row for row in self._early if row["step"] <= self._published]
        self._early = [row for row in self._early if row["step"] > self._published]
        for row in due:
            lasted = row["epoch"] >= self._epoch_of(row["step"])
            if lasted and self._shared.before(row) is None:
                self._metrics_file.write(logged_row(row))

    def _epoch_of(self, step: int) -> int:
        """Return the epoch in which a published step was committed; 0 if it is not known."""
        at = bisect_right(self._epochs, step, key=lambda first: first[0])
        return self._epochs[at - 1][1] if at else 0

    def _rewind(self) -> None:
        """Write metrics.jsonl again from its first line, because some of its steps were undone."""
        self._metrics_file.close()
        with contextlib.suppress(OSError):  # a failing disk loses lines too, and that is reported
            os.truncate(self._run.metrics, 0)
        self._metrics_file = Queued(self._run.metrics, self._lost.append)
        self._silent_to = self._newest_epoch
        self._tally.again()
        self._begin(CommitMerger(self._merger.rewinds))

    def _take_fed(self, fed: Iterable[tuple[int, Row]]) -> None:
        for replica, line in fed:
            self._tally.fed(replica, line)
