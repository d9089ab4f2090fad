"""Merges what all processes of a run log into its events.jsonl, metrics.jsonl and summary.json."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from ft_hsdp.analysis.commits import COUNTED, CommitMerger, canonical, metrics_row, newest_final
from ft_hsdp.config import Config
from ft_hsdp.jsonl import Lost, Queued
from ft_hsdp.launch.run.audit import WINDOW
from ft_hsdp.launch.run.directory import Row, RunDir, Tailer, read_json, read_jsonl, write_json
from ft_hsdp.launch.run.summary import RunTally, Summary

FED_BYTES = 64 << 10  # of what one replica has fed, in one piece

Sink = Callable[[Row], None]


def events_of(run: RunDir) -> list[Row]:
    """All events of a run, by time: the merged ones, or what each process logged if they are not merged."""
    logs = [run.events] if run.events.exists() else logs_of(run, 1 + max(run.replicas(), default=-1))
    events = [event for log in logs for event in read_jsonl(log) if "t" in event and "event" in event]
    return sorted(events, key=lambda event: event["t"])


def commits_of(run: RunDir) -> list[Row]:
    """The canonical commits of a run so far, by step, from the logs of its replicas."""
    return canonical((read_jsonl(run.commits(n)) for n in run.replicas()), finals_of(run).values())


def finals_of(run: RunDir) -> dict[int, Row]:
    """The final.json of each replica that has written one."""
    return {n: final for n in run.replicas() if (final := read_json(run.final(n)))}


def logs_of(run: RunDir, replicas: int) -> list[Path]:
    """Where the processes of a run log their events, before they are merged."""
    of_one = (run.replica_events, run.supervision, run.injections)
    return [run.lighthouse_events, *(log(n) for n in range(replicas) for log in of_one)]


class Recorder:
    """The only writer of the merged files. `on_commit` and `on_event` hear of each line."""

    def __init__(self, run: RunDir, config: Config, on_commit: Sink, on_event: Sink) -> None:
        self._run = run
        self._config = config
        self._on_commit = on_commit
        self._on_event = on_event
        self._logs = [Tailer(path) for path in logs_of(run, config.slots)]
        self._lost: deque[Lost] = deque()  # of the merged files, as their threads found
        self._events_file = Queued(run.events, self._lost.append)
        self._metrics_file = Queued(run.metrics, self._lost.append)
        self._tally = RunTally(config)
        self._told = self._heard = -1  # the newest epoch of a commit that was told, and of one that is told again
        self._begin(CommitMerger())

    def _begin(self, merger: CommitMerger) -> None:
        """Read what was committed and fed from the first line on."""
        run, slots = self._run, range(self._config.slots)
        self._merger = merger
        self._commits = [Tailer(run.commits(n)) for n in slots]
        self._fed = {n: Tailer(run.fed(n)) for n in slots}
        self._fed_to = dict.fromkeys(self._fed, 0)  # the newest step of each

    @property
    def awaited(self) -> int:
        """How many batches are listed by commits, and by no line yet of what was fed."""
        return self._tally.audit.awaited

    @property
    def newest(self) -> Row | None:
        """The newest commit that any replica logged, confirmed or not."""
        return self._merger.newest

    def emit(self, event: Row) -> None:
        """Record an event of this process."""
        self._events_file.write(event)
        self._tally.event(event)
        self._on_event(event)

    def poll(self) -> bool:
        """Take what was logged since the last call, or a piece of it where that is much; whether there was any."""
        while self._lost:
            self.emit({**self._lost.popleft().event, "source": "supervisor"})
        fresh = [event for log in self._logs for event in log.poll() if "t" in event and "event" in event]
        for event in sorted(fresh, key=lambda event: event["t"]):
            self.emit(event)
        rows = [row for commits in self._commits for row in commits.poll() if row.keys() >= COUNTED]
        self._merger.add(rows)
        if self._merger.undone:
            self._rewind()
        self._publish(self._merger.confirmed())
        fed = self._take_fed(ahead=WINDOW)
        return bool(fresh or rows or fed)

    def finish(self, lost: Iterable[int] = ()) -> Summary:
        """Take the last lines and write summary.json."""
        while self.poll():
            pass
        finals = finals_of(self._run)
        last = newest_final(finals.values())
        self._publish(self._merger.finish(last["lineage"] if last else None))
        while self._take_fed(ahead=math.inf):
            pass
        summary = self._tally.summary(finals, lost)
        try:
            write_json(self._run.summary, summary)
        except OSError as error:
            unwritten = Lost(self._run.summary.name, 1, time.time(), time.time(), error.strerror or str(error))
            self.emit({**unwritten.event, "source": "supervisor"})
        return summary

    def close(self) -> None:
        """Close the files."""
        self._events_file.close()
        self._metrics_file.close()

    def _publish(self, rows: list[Row]) -> None:
        for row in rows:
            self._metrics_file.write(metrics_row(row))
            self._tally.commit(row)
            if row["epoch"] > self._heard:
                self._on_commit(row)
            self._told = max(self._told, row["epoch"])

    def _rewind(self) -> None:
        """Steps in metrics.jsonl have been undone: write the history that lasts anew."""
        self._metrics_file.close()
        with contextlib.suppress(
            OSError
        ):  # a disk that does not take this takes no lines either, and that is told
            os.truncate(self._run.metrics, 0)
        self._metrics_file = Queued(self._run.metrics, self._lost.append)
        self._heard = self._told
        self._tally.again()
        self._begin(CommitMerger(self._merger.rewinds))

    def _take_fed(self, ahead: float) -> bool:
        """Take what was fed, up to `ahead` steps beyond the newest canonical one; whether there was any.

        The audit keeps each commit until it has seen what was fed for it, so this reads as far as the commits go.
        """
        taken = False
        for replica, log in self._fed.items():
            while self._fed_to[replica] <= self._tally.audit.steps + ahead:
                before = log.line
                for line in log.poll(FED_BYTES):
                    self._tally.fed(replica, line)
                    self._fed_to[replica] = line.get("step", 0)
                if log.line == before:
                    break
                taken = True
        return taken
