"""`verify RUN`: whether what a finished run has logged is a history that the protocol allows.

Every log is read a piece at a time, all of them at the pace of the steps, so what is in memory does not grow with
the run. What a disk or a machine did not keep, and the run has told, is not held against it.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_hsdp.analysis.commits import COUNTED, CommitMerger, Rewind, newest_final
from ft_hsdp.config import config_hash, load
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.audit import WINDOW
from ft_hsdp.launch.run.directory import Row, RunDir, Tailer, another, read_json
from ft_hsdp.launch.run.grants import KEPT, LoggedGrant, LoggedGrants
from ft_hsdp.launch.run.recorder import finals_of, logs_of
from ft_hsdp.launch.run.summary import RunTally

AT_ONCE = 64 << 10  # bytes of each log that are in memory
SEARCHED = 64 * WINDOW  # lineages that are read for a line of metrics.jsonl that they do not have
FED_EVERY = 64  # steps between two looks at what was fed
SAME = ("step", "epoch", "attempt", "prev", "contributors", "contributions", "digest", "cursors", "holes")
SUMMED = ("steps", "tokens", "batches", "replicas", "loss_first", "loss_last", "wall_s")


@dataclass(slots=True)
class Findings:
    """What was checked of a run. breaches: one line each, file:line, what was found, what is expected."""

    steps: int = 0
    grants: int = 0
    lost: int = 0  # lines that the run itself says are missing, at least
    breaches: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        unsure = [f"not checked: {self.lost} lines were lost, which the run has told"] if self.lost else []
        end = f"{self.steps} steps, {self.grants} grants: " + (
            f"{len(self.breaches)} breaches" if self.breaches else "no breach"
        )
        return [*self.breaches, *unsure, end]


def verify(run: RunDir) -> Findings:
    """Check a run that has ended. Raises ConfigError."""
    if another(read_json(run.supervisor)):
        raise ConfigError("run", str(run.path), "a run that has ended")
    return _Check(run).all()


class _Commits:
    """The commit logs of all replicas, read in the order of steps as far as they are asked for."""

    def __init__(self, logs: dict[int, Tailer]) -> None:
        self._logs = logs
        self._newest = dict.fromkeys(logs, -1)  # step, of logs that go on
        self.top = 0

    @property
    def behind(self) -> float:
        """The step up to which all logs are read; inf: there is no more."""
        return min(self._newest.values(), default=math.inf)

    def read(self) -> list[tuple[int, int, Row]]:
        """The next rows of the log that is behind most, each with its replica and line."""
        while self._newest:
            replica = min(self._newest, key=lambda r: self._newest[r])
            log = self._logs[replica]
            first = log.line
            rows = log.poll(AT_ONCE)
            if rows:
                steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
                self._newest[replica] = steps[-1] if steps else self._newest[replica]
                self.top = max([self.top, *steps])
                return [(replica, number, row) for number, row in enumerate(rows, first + 1)]
            if log.line == first:
                del self._newest[replica]
        return []


class _Check:
    def __init__(self, run: RunDir) -> None:
        self._run = run
        config, self._replicas = load(run.config), run.replicas()
        self._config = config_hash(config)
        self.found = Findings()
        log = run.lighthouse_events
        self._grants = LoggedGrants(
            Tailer(log), self._name(log), config.slots, self._config, self._breach, self._granted
        )
        self._commits = _Commits({r: Tailer(run.commits(r)) for r in self._replicas})
        self._fed = {r: Tailer(run.fed(r)) for r in self._replicas}
        self._fed_to = dict.fromkeys(self._replicas, 0)
        self._lives: dict[int, Row] = {}  # the newest row of each replica
        self._seen: OrderedDict[str, tuple[str, Row]] = OrderedDict()  # lineage -> where it was first, its row
        self._decided: OrderedDict[tuple[int, int, int], str] = OrderedDict()  # step, epoch, attempt -> lineage
        self._awaited: dict[str, tuple[str, str]] = {}  # lineage -> which row builds on it, and on what it should
        self._bases: dict[str, LoggedGrant] = {}  # lineages that no row is of so far
        self._rows: dict[str, list[Row]] = {}  # lineage -> rows above the last canonical step
        self._tally = RunTally(config)
        self._events = _by_time(run)
        self._event = next(self._events, None)
        self._last: Row | None = None
        self._first_step: int | None = None
        self._epoch = 0  # of the newest grant that was read
        self._least = 0  # the epoch of the line of metrics.jsonl that is looked for: later lines have later ones
        self._undone = False  # whether the run went back by some steps

    def all(self) -> Findings:
        """Check everything."""
        run = self._run
        merged = run.events.exists()
        self._strict(run.events, count=True)
        for path in [run.lighthouse_events, *map(run.replica_events, self._replicas)]:
            self._strict(path, count=not merged)
        self._strict(run.metrics, count=False)
        if run.metrics.exists() and not self.found.lost:
            self._follow()
        else:
            self._merge()
        while self._read():
            pass
        while self._grants.next() is not None:
            pass
        self._hear(math.inf)
        self._feed(math.inf)
        self._left()
        self._ends()
        self.found.grants = self._grants.number
        return self.found

    def _breach(self, where: str, found: object, expected: str) -> None:
        self.found.breaches.append(f"{where}: {found}; expected: {expected}")

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._run.path))

    def _strict(self, path: Path, *, count: bool) -> None:
        """Every line is strict JSON; what a disk tore is said to be torn. count: what it tells of itself."""

        def refuse(constant: str) -> None:
            raise ValueError(constant)

        if not path.exists():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line, parse_constant=refuse) if line.strip() else {}
                except ValueError as error:
                    self._breach(f"{self._name(path)}:{number}", f"no strict JSON ({error})", "a row, or nothing")
                    continue
                name = row.get("event") if count and isinstance(row, dict) else None
                self._undone |= name in ("HeadRolledBack", "RewindOrdered")
                if name in ("LogLinesLost", "LogCut"):
                    self.found.lost += int(row.get("lines", 1))

    # From the logs to the history that lasted.

    def _follow(self) -> None:
        """metrics.jsonl is a chain of commits without holes."""
        metrics = Tailer(self._run.metrics)
        for line in metrics.all():
            where = f"metrics.jsonl:{metrics.line}"
            row = self._row_of(line)
            if row is None:
                at = f"step {line.get('step')}, lineage {line.get('lineage')}"
                self._breach(where, at, "a step and a lineage that somebody committed")
                continue
            before = self._last
            if before is not None and (row["step"], row["prev"]) != (before["step"] + 1, before["lineage"]):
                after = f"step {before['step']}, lineage {before['lineage']}"
                self._breach(where, f"step {row['step']} on lineage {row['prev']}", f"on {after}")
            self._told(row)

    def _row_of(self, line: Row) -> Row | None:
        """The row that a line of metrics.jsonl was made of; one of the same lineage where it is not there."""
        step, lineage, self._least = line.get("step"), line.get("lineage"), line.get("epoch", 0)
        if not isinstance(step, int) or not isinstance(lineage, str):
            return None
        while True:
            rows = self._rows.get(lineage, [])
            exact = next((row for row in rows if row["t"] == line.get("t")), None)
            enough = self._commits.behind > step if rows else len(self._rows) > SEARCHED
            if exact is not None or enough or not self._read():
                return exact or next((row for row in rows if row["step"] == step), None)

    def _merge(self) -> None:
        """Merge the logs here: they are not merged, or the disk did not take all of them."""
        merger = CommitMerger(self._rewinds())
        waiting: list[Row] = []
        while rows := self._read():
            waiting += rows
            read = self._commits.behind  # a row beyond it may be another replica's, of a step that this one lacks
            merger.add(row for row in waiting if row["step"] <= read)
            waiting = [row for row in waiting if row["step"] > read]
            for row in merger.confirmed():
                self._told(row)
        merger.add(waiting)
        last = newest_final(finals_of(self._run).values())
        for row in merger.finish(last["lineage"] if last else None):
            self._told(row)

    def _rewinds(self) -> tuple[Rewind, ...]:
        """Where the run went back by several steps: its logs are read for that alone first."""
        merger, again = CommitMerger(), self._undone
        while again:
            merger = CommitMerger(merger.rewinds)
            logs = [Tailer(self._run.commits(r)) for r in self._replicas]
            while not merger.undone and any(rows := [log.poll(AT_ONCE) for log in logs]):
                merger.add(row for of_one in rows for row in of_one if row.keys() >= COUNTED)
                merger.confirmed()
            again = merger.undone
        return merger.rewinds

    def _told(self, row: Row) -> None:
        """Take the next canonical row."""
        self._last = row
        if self._first_step is None:
            self._first_step = row["step"]
        self._hear(row["t"])
        self._tally.commit(row)
        self.found.steps += 1
        if self.found.steps % FED_EVERY == 0:
            self._feed(row["step"])
            self._rows = {name: rows for name, rows in self._rows.items() if rows[0]["step"] > row["step"]}

    def _hear(self, until: float) -> None:
        """Take the events up to a time."""
        while self._event is not None and self._event["t"] <= until:
            self._tally.event(self._event)
            self._event = next(self._events, None)

    def _feed(self, until: float) -> None:
        """Take what was fed up to a step."""
        for replica, log in self._fed.items():
            while self._fed_to[replica] <= until and (lines := log.poll(AT_ONCE)):
                for line in lines:
                    self._tally.fed(replica, line)
                    self._fed_to[replica] = line.get("step", 0)

    # Row by row.

    def _read(self) -> list[Row]:
        """Check the next rows of a commit log; [] at the end."""
        taken: list[Row] = []
        while not taken and (rows := self._commits.read()):
            for replica, number, row in rows:
                where = f"{self._name(self._run.commits(replica))}:{number}"
                if not row.keys() >= COUNTED:
                    if row.keys() != {"torn"} and row:
                        self._breach(where, "no commit", "a row with all its fields")
                    continue
                self._row(where, row, self._lives.get(replica))
                self._lives[replica] = row
                taken.append(row)
                if row["epoch"] >= self._least and (self._last is None or row["step"] > self._last["step"]):
                    self._rows.setdefault(row["lineage"], []).append(row)
        return taken

    def _row(self, where: str, row: Row, before: Row | None) -> None:
        """A commit fits its grant, what others tell of its lineage, and the one before."""
        contributors, ring = row["contributors"], row.get("ring", row["contributors"])
        if contributors != sorted(set(contributors)) or not set(contributors) <= set(ring or ()):
            self._breach(where, f"contributors {contributors}", f"each once, of the ring {ring}")
        self._in_epoch(where, row, set(ring or ()), set(contributors))
        self._bases.pop(row["lineage"], None)
        self._awaited.pop(row["lineage"], None)
        seen_at, seen = self._seen.setdefault(row["lineage"], (where, row))
        for key in SAME:
            if seen.get(key) != row.get(key):
                self._breach(where, f"{key} {row.get(key)}", f"{seen.get(key)}, as {seen_at} has for this lineage")
        decision = row["step"], row["epoch"], row["attempt"]
        if self._decided.setdefault(decision, row["lineage"]) != row["lineage"]:
            at = f"step {row['step']}, epoch {row['epoch']}, attempt {row['attempt']}"
            self._breach(where, f"a second lineage of {at}", "one commit")
        if before is not None and before["incarnation"] == row["incarnation"]:
            if row["epoch"] < before["epoch"]:
                self._breach(where, f"epoch {row['epoch']} after {before['epoch']}", "epochs that rise")
            follows = row["step"] == before["step"] + 1 and row["role"] == "contribute"
            if follows and row["prev"] != before["lineage"] and row["prev"] not in self._seen:
                self._awaited[row["prev"]] = where, before["lineage"]
        for kept in (self._seen, self._decided):
            if len(kept) > KEPT:
                kept.popitem(last=False)

    def _granted(self, grant: LoggedGrant) -> None:
        """Take a grant: a replica commits, or has committed, the state on which it begins."""
        lineage, step = grant.base
        if step > max(0, self._commits.top - KEPT // 2) and lineage not in self._seen:
            self._bases[lineage] = grant
        if grant.epoch < self._epoch:  # all was lost, and begins again: epochs have another meaning
            self._decided.clear()
        self._epoch = grant.epoch

    def _in_epoch(self, where: str, row: Row, ring: set[int], contributors: set[int]) -> None:
        def fits(grant: LoggedGrant) -> bool:
            return ring <= grant.members and contributors <= (grant.able or contributors)

        grant = self._grants.find(row["epoch"], fits)
        if grant is None:
            if self._grants.number and not self.found.lost and row["epoch"] > self._grants.forgotten:
                self._breach(where, f"a commit of epoch {row['epoch']}", "an epoch that was granted")
            return
        grant.used = True
        if not ring <= grant.members:
            members = sorted(grant.members)
            self._breach(where, f"ring {sorted(ring)}", f"of the members {members} of epoch {row['epoch']}")
        elif not fits(grant):
            self._breach(
                where, f"contributors {sorted(contributors)}", f"of {sorted(grant.able)}, who were to contribute"
            )

    def _left(self) -> None:
        """Note what no replica has logged although others build on it."""
        if self.found.lost:
            return
        for where, own in self._awaited.values():
            self._breach(where, "built on a state that nobody committed", f"{own}, which it committed before")
        for grant in self._bases.values():
            if grant.used and grant.base[1] >= (self._first_step or 0):
                self._breach(grant.where, f"a grant on step {grant.base[1]}", "a base that was committed")

    # The end.

    def _ends(self) -> None:
        """One state shows one digest; the summary is what the logs add up to; no batch twice or never."""
        run, finals = self._run, finals_of(self._run)
        digests: dict[tuple[Any, ...], tuple[int, str]] = {}
        for replica, final in finals.items():
            where, state = self._name(run.final(replica)), (final["commit_epoch"], final["step"], final["lineage"])
            other, digest = digests.setdefault(state, (replica, final["digest"]))
            if digest != final["digest"]:
                self._breach(where, f"digest {final['digest']}", f"{digest}, as replica {other} at the same state")
            if final.get("config_hash", self._config) != self._config:
                self._breach(where, f"config_hash {final['config_hash']}", f"{self._config}, of config.yaml")
        batches = self._tally.audit.result()
        for name in ("duplicated", "skipped"):
            if batches[name]:
                self._breach("replicas/*/fed.jsonl", f"{batches[name]} batches {name}", "each exactly once")
        if self.found.lost:
            return
        end, last = newest_final(finals.values()), self._last
        if end is not None and last is not None and end["lineage"] != last["lineage"]:
            at = f"step {last['step']}, lineage {last['lineage']} at the end"
            self._breach("metrics.jsonl", at, f"step {end['step']}, lineage {end['lineage']}, as the replicas")
        top = 0 if end is not None or self._undone else self._commits.top
        if last is not None and last["step"] < top:
            self._breach("metrics.jsonl", f"step {last['step']} at the end", f"step {top}")
        self._summary(finals)

    def _summary(self, finals: dict[int, Row]) -> None:
        written = read_json(self._run.summary)
        if written is None:
            if self._run.metrics.exists():
                self._breach("summary.json", "none", "the figures of the run")
            return
        counted = json.loads(json.dumps(self._tally.summary(finals, written.get("lost", ()))))
        for key in SUMMED:
            same = written.get(key) == counted[key]
            if isinstance(counted[key], float) and isinstance(written.get(key), int | float):
                same = abs(written[key] - counted[key]) <= 1e-6 * max(1.0, abs(counted[key]))
            if not same:
                self._breach("summary.json", f"{key} {written.get(key)}", f"{counted[key]}, by the logs")


def _by_time(run: RunDir) -> Iterator[Row]:
    """All events of a run: as they were merged, or by time if they are not merged."""
    logs = [run.events] if run.events.exists() else logs_of(run, 1 + max(run.replicas(), default=-1))
    each = ((event for event in Tailer(log).all() if "t" in event and "event" in event) for log in logs)
    return heapq.merge(*each, key=lambda event: event["t"])
