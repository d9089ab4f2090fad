"""Merges what all processes of a run log into its events.jsonl, metrics.jsonl and summary.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ft_hsdp.config import Config
from ft_hsdp.launch.merge import Merger, metrics_row
from ft_hsdp.launch.rundir import Appender, Row, RunDir, Tailer, read_json, read_jsonl, write_json
from ft_hsdp.launch.summary import Summary, summarize

Sink = Callable[[Row], None]


def events_of(run: RunDir) -> list[Row]:
    """All events of a run, by time: the merged ones, or what each process logged where nobody merged them."""
    logs = [run.events] if run.events.exists() else _logs(run, 1 + max(run.replicas(), default=-1))
    events = [event for log in logs for event in read_jsonl(log) if "t" in event and "event" in event]
    return sorted(events, key=lambda event: event["t"])


def _logs(run: RunDir, replicas: int) -> list[Path]:
    """Where the processes of a run log their events."""
    of_one = (run.replica_events, run.supervision, run.injections)
    return [run.lighthouse_events, *(log(n) for n in range(replicas) for log in of_one)]


class Recorder:
    """The only writer of the merged files. `on_commit` and `on_event` hear of each line."""

    def __init__(self, run: RunDir, config: Config, on_commit: Sink, on_event: Sink) -> None:
        self._run = run
        self._config = config
        self._on_commit = on_commit
        self._on_event = on_event
        self._commits = [Tailer(run.commits(n)) for n in range(config.slots)]
        self._logs = [Tailer(path) for path in _logs(run, config.slots)]
        self._events_file = Appender(run.events)
        self._metrics_file = Appender(run.metrics)
        self._merger = Merger()
        self._events: list[Row] = []

    @property
    def newest(self) -> Row | None:
        """The newest commit that any replica logged, confirmed or not."""
        return self._merger.newest

    def emit(self, event: Row) -> None:
        """Record an event of this process."""
        self._events_file.append(event)
        self._events.append(event)
        self._on_event(event)

    def poll(self) -> None:
        """Take what was logged since the last call."""
        fresh = [event for log in self._logs for event in log.poll() if "t" in event and "event" in event]
        for event in sorted(fresh, key=lambda event: event["t"]):
            self.emit(event)
        for commits in self._commits:
            self._merger.add(commits.poll())
        self._publish(self._merger.confirmed())

    def finish(self, lost: Iterable[int] = ()) -> Summary:
        """Take the last lines and write summary.json."""
        self.poll()
        finals = {n: row for n in range(self._config.slots) if (row := read_json(self._run.final(n)))}
        last = max(finals.values(), key=lambda row: (row["commit_epoch"], row["step"]), default=None)
        self._publish(self._merger.finish(last["lineage"] if last else None))
        fed = {n: read_jsonl(self._run.fed(n)) for n in range(self._config.slots)}
        summary = summarize(self._config, self._merger.canonical, fed, finals, self._events, sorted(lost))
        write_json(self._run.summary, summary)
        return summary

    def close(self) -> None:
        """Close the files."""
        self._events_file.close()
        self._metrics_file.close()

    def _publish(self, rows: list[Row]) -> None:
        for row in rows:
            self._metrics_file.append(metrics_row(row))
            self._on_commit(row)
