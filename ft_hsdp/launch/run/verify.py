"""`verify`: checks that the logs of a finished run are a history that the protocol allows.

All logs are read side by side, step by step and a piece at a time, so memory does not grow with the run. The
commit logs are merged once more, and metrics.jsonl has to have the same history. Lines that a disk or a machine
lost are no breach if the run has reported them.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_hsdp.analysis.commits import CommitMerger, Rewind, counted, newest_final, record_of
from ft_hsdp.config import config_hash, load
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.replica_state import other_data
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import open_regular, parsed
from ft_hsdp.launch.run.directory import DAMAGED, Row, RunDir, Tailer, another, read_json
from ft_hsdp.launch.run.grants import KEPT, LoggedGrant, LoggedGrants
from ft_hsdp.launch.run.recorder import FedLogs, event_streams, finals_of
from ft_hsdp.launch.run.summary import RunTally

AT_ONCE = 64 << 10  # bytes of each log that are in memory
FED_EVERY = 64  # steps between two reads of fed.jsonl
# Fields that all commits of a lineage share, and figures of summary.json that are computed again.
SAME = (
    "step",
    "epoch",
    "attempt",
    "prev",
    "ring_widths",
    "contributors",
    "contributions",
    "digest",
    "cursors",
    "holes",
    "units",
    "units_wanted",
)
SUMMED = ("steps", "tokens", "batches", "replicas", "loss_first", "loss_last", "wall_s", "narrow_steps")


@dataclass(slots=True)
class Findings:
    steps: int = 0  # canonical commits
    grants: int = 0
    lost: int = 0  # smallest number of lines that the run itself reports as missing
    breaches: list[str] = field(default_factory=list)  # a line each: "file:line: what is there; expected: what"

    @property
    def lines(self) -> list[str]:
        unsure = (
            [f"the run reports lost lines, at least {self.lost}: chains and sums are not checked"]
            if self.lost
            else []
        )
        count = len(self.breaches)
        found = "no breach" if count == 0 else "1 breach" if count == 1 else f"{count} breaches"
        end = f"{self.steps} steps, {self.grants} grants: {found}"
        return [*self.breaches, *unsure, end]


def verify(run: RunDir) -> Findings:
    """Check a run that has ended.

    Raises:
        ConfigError: The run still runs, or its config.yaml cannot be loaded.
    """
    # A lighthouse that was started by itself stays when its job has ended.
    if another(read_json(run.supervisor)) or (not run.summary.exists() and another(read_json(run.lighthouse))):
        raise ConfigError("run", str(run.path), "a run that has ended")
    return _Check(run).all()


class _Commits:
    """The commit logs of all replicas, read side by side in the order of steps."""

    def __init__(self, logs: dict[int, Tailer]) -> None:
        self._logs = logs
        self._newest = dict.fromkeys(logs, -1)  # the last step that was read of each log; ended logs are removed
        self.top = 0  # the largest step that was read

    @property
    def read_to(self) -> float:
        """Return the step up to which all logs are read; inf at the end of all."""
        return min(self._newest.values(), default=math.inf)

    def read(self) -> list[tuple[int, int, Row]]:
        """Return the next rows of the log that is farthest behind, as (replica, line, row); [] at the end."""
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
    """One check of one run; `all` does it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        config, self._replicas = load(run.config), run.replicas()
        self._config = config_hash(config)
        self._ranks = config.ranks_per_replica
        self._shared = config.data.assignment == "global"
        self.found = Findings()
        log = run.lighthouse_events
        self._grants = LoggedGrants(
            Tailer(log), self._name(log), config.slots, self._config, self._breach, self._granted
        )
        self._commits = _Commits({r: Tailer(run.commits(r)) for r in self._replicas})
        self._fed = FedLogs(run, self._replicas)
        self._metrics = Tailer(run.metrics)
        self._whole = run.summary.exists()  # the merged files are whole, or ought to be: the job has ended
        self._told: Iterator[Row] | None = None  # its lines of steps; None: they are not compared
        self._previous: dict[int, Row] = {}  # the last row that was read of each replica
        self._seen: OrderedDict[str, tuple[str, Row]] = OrderedDict()  # lineage -> its first place and row
        self._decided: OrderedDict[tuple[int, int, int], str] = OrderedDict()  # step, epoch, attempt -> lineage
        # Lineages on which a row builds without a row of their own so far: the place of that row, and the lineage
        # that the same replica had committed before.
        self._awaited: dict[str, tuple[str, str]] = {}
        self._bases: dict[str, LoggedGrant] = {}  # lineages on which a grant builds, without a row so far
        self._data: dict[str, tuple[str, str]] = {}  # fact about the data -> its value, and where it stands
        self._tally = RunTally(config)
        # In the order of events.jsonl, or by time if they are not merged.
        self._events = heapq.merge(*event_streams(run), key=lambda event: event["t"])
        self._event = next(self._events, None)
        self._last: Row | None = None  # the newest canonical row
        self._first_step: int | None = None  # of the canonical rows
        self._epoch = 0  # of the newest grant that was read
        self._undone = False  # the run undid some steps
        self._at = ""  # place of the row that is looked at

    def all(self) -> Findings:
        try:
            self._check()
        except DAMAGED as error:
            what = f"odd values ({type(error).__name__}: {error})"
            self._breach(self._at, what, "what a process of the job writes; what comes after it is not checked")
        self.found.grants = self._grants.number
        return self.found

    def _check(self) -> None:
        run = self._run
        of_one = (run.commits, run.fed, run.replica_events, run.final)
        of_replicas = [log(n) for n in self._replicas for log in of_one]
        for path in (run.events, run.metrics, run.summary, run.lighthouse_events, *of_replicas):
            try:
                open_regular(path).close()
                if path.suffix == ".json" and read_json(path) is None:
                    self._breach(self._name(path), "no JSON object", "what was written at the end")
            except FileNotFoundError:
                pass
            except OSError as error:
                self._breach(self._name(path), error.strerror or error, "a file that can be read")
        merged = run.events.exists()
        self._strict(run.events, count=True)
        for path in [run.lighthouse_events, *map(run.replica_events, self._replicas)]:
            self._strict(path, count=not merged)
        self._strict(run.metrics, count=False)
        if run.metrics.exists() and not self.found.lost:
            self._told = (line for line in self._metrics.all() if "logged" not in line)
        self._merge()
        if self._told is not None and (line := next(self._told, None)) is not None:
            self._breach(self._line, f"step {line.get('step')}", "the end: no replica committed it")
        while self._grants.next() is not None:
            pass
        self._take_events(math.inf)
        self._take_fed(math.inf)
        self._check_awaited()
        self._at = "replicas/*/final.json"
        self._check_ends()

    def _breach(self, where: str, found: object, expected: str) -> None:
        self.found.breaches.append(f"{where}: {found}; expected: {expected}")

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._run.path))

    def _strict(self, path: Path, *, count: bool) -> None:
        """Check that every line of a log is strict JSON; with `count`, note the losses that its events report."""

        def refuse(constant: str) -> None:
            raise ValueError(constant)

        try:
            opened = open_regular(path)
        except OSError:
            return
        with opened as file:
            for number, line in enumerate(file, 1):
                try:
                    row = parsed(line, refuse) if line.strip() else {}
                except ValueError as error:
                    self._breach(f"{self._name(path)}:{number}", f"no strict JSON ({error})", "a row, or nothing")
                    continue
                name = row.get("event") if count and isinstance(row, dict) else None
                if name == "FirstStepCommitted" and isinstance(row.get("data"), dict):
                    self._same_data(f"{self._name(path)}:{number}", row["data"])
                self._whole |= name == "JobFinished"
                self._undone |= name in ("HeadRolledBack", "RewindOrdered")
                if name in ("LogLinesLost", "LogCut"):
                    self.found.lost += int(row.get("lines", 1))

    def _same_data(self, where: str, facts: dict[str, str]) -> None:
        """Check that an incarnation that took part had the data of those before it."""
        told = {fact: value for fact, (value, _) in self._data.items()}
        if (found := other_data(facts, told)) is not None:
            fact, value, known = found
            self._breach(where, f"data: {fact} {value}", f"{known}, as {self._data[fact][1]} has")
        self._data = {**{fact: (value, where) for fact, value in facts.items()}, **self._data}

    # From the logs to the history that lasted.

    def _merge(self) -> None:
        """Merge the commit logs into the history that lasted."""
        merger = CommitMerger(self._rewinds())
        waiting: list[Row] = []
        while rows := self._read():
            waiting += rows
            read_to = self._commits.read_to  # rows of later steps wait: other logs may have rows of earlier ones
            merger.add(row for row in waiting if row["step"] <= read_to)
            waiting = [row for row in waiting if row["step"] > read_to]
            for row in merger.confirmed():
                self._canonical(row)
        merger.add(waiting)
        last = newest_final(finals_of(self._run).values())
        for row in merger.finish(last["lineage"] if last else None):
            self._canonical(row)

    def _rewinds(self) -> tuple[Rewind, ...]:
        """Return where the run undid several steps; the commit logs are read once more to find that."""
        merger, again = CommitMerger(), self._undone
        while again:
            merger = CommitMerger(merger.rewinds)
            logs = [Tailer(self._run.commits(r)) for r in self._replicas]
            while not merger.undone and any(rows := [log.poll(AT_ONCE) for log in logs]):
                merger.add(row for of_one in rows for row in of_one if counted(row))
                merger.confirmed()
            again = merger.undone
        return merger.rewinds

    def _canonical(self, row: Row) -> None:
        self._last = row
        if self._first_step is None:
            self._first_step = row["step"]
        if self._told is not None:
            row = {**row, **self._compared(row, next(self._told, None))}
        self._take_events(row["t"])
        self._tally.commit(row)
        self.found.steps += 1
        if self.found.steps % FED_EVERY == 0:
            self._take_fed(row["step"])

    def _compared(self, row: Row, line: Row | None) -> Row:
        """Return a line of metrics.jsonl that has a commit, of whichever replica; {} if it has another one."""
        self._at = self._line
        if line is not None and (line.get("step"), line.get("lineage")) == (row["step"], row["lineage"]):
            return line
        self._told = None
        found = "the end" if line is None else f"step {line.get('step')}, lineage {line.get('lineage')}"
        if line is not None or self._whole:
            self._breach(self._line, found, f"step {row['step']}, lineage {row['lineage']}, as the replicas have")
        return {}

    @property
    def _line(self) -> str:
        return f"metrics.jsonl:{self._metrics.line}"

    def _take_events(self, until: float) -> None:
        """Add the events up to a Unix time to the figures."""
        while self._event is not None and self._event["t"] <= until:
            try:
                self._tally.event(self._event)
            except DAMAGED as error:
                self._breach("events.jsonl", f"{self._event['event']} with odd values ({error})", "an event")
            self._event = next(self._events, None)

    def _take_fed(self, until: float) -> None:
        """Add the units that were fed up to a step to the figures."""
        for replica, line in self._fed.upto(until):
            self._at = self._name(self._run.fed(replica))
            self._tally.fed(replica, line)

    # Row by row.

    def _read(self) -> list[Row]:
        """Check the next rows of a commit log and return them; [] at the end."""
        taken: list[Row] = []
        while not taken and (rows := self._commits.read()):
            for replica, number, row in rows:
                where = self._at = f"{self._name(self._run.commits(replica))}:{number}"
                if not counted(row):
                    if row.keys() != {"torn"} and row:
                        self._breach(where, "no commit", "a row with all its fields")
                    continue
                self._row(where, row, self._previous.get(replica))
                self._previous[replica] = row
                taken.append(row)
        return taken

    def _row(self, where: str, row: Row, before: Row | None) -> None:
        """Check that a commit fits its grant, other rows of its lineage, and the row before it in its log."""
        record = record_of(row)
        if wrong := record.impossible(self._shared):
            self._breach(where, wrong, "what a step can have")
        for key, true in (("contributors", list(record.contributors)), ("units", record.units)):
            if row[key] != true:
                self._breach(where, f"{key} {row[key]}", f"{true}, by its contributions")
        widths = self._widths(where, record)
        self._in_epoch(where, row, set(record.ring), set(record.contributors), widths)
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
        """Note a grant; its base is a state that a replica commits, or has committed."""
        lineage, step = grant.base
        if step > max(0, self._commits.top - KEPT // 2) and lineage not in self._seen:
            self._bases[lineage] = grant
        if grant.epoch < self._epoch:  # everything was lost and the job began again, with the same epochs
            self._decided.clear()
        self._epoch = grant.epoch

    def _widths(self, where: str, record: CommitRecord) -> dict[int, int]:
        """Check that contributions have the width of their member, and return the known ranks of members."""
        ring, told = list(record.ring), list(record.ring_widths)
        if told and (len(told) != len(ring) or len(set(told)) == 1):
            self._breach(where, f"ring_widths {told}", f"unequal ones, one for each member of the ring {ring}")
        found = [(c.replica, c.width or self._ranks) for c in record.contributions]
        widths = dict(zip(ring, told, strict=False)) if told else dict.fromkeys(ring, found[0][1] if found else 0)
        why = "by ring_widths" if told else "as there are no ring_widths"
        for replica, width in found:
            if width != (wanted := widths.get(replica, width)):
                self._breach(where, f"a contribution of replica {replica} by {width} ranks", f"{wanted}, {why}")
        return widths if found else {}

    def _in_epoch(
        self, where: str, row: Row, ring: set[int], contributors: set[int], widths: Mapping[int, int]
    ) -> None:
        """Check that the ring and the contributors of a commit are members of the grant of its epoch."""

        def fits(grant: LoggedGrant) -> bool:
            ranks = all(grant.ranks.get(replica, width) == width for replica, width in widths.items())
            return ring <= grant.members and contributors <= (grant.contributors or contributors) and ranks

        grant = self._grants.find(row["epoch"], fits)
        if grant is None:
            if self._grants.number and not self.found.lost and row["epoch"] > self._grants.forgotten:
                self._breach(where, f"a commit of epoch {row['epoch']}", "an epoch that was granted")
            return
        grant.used = True
        if not ring <= grant.members:
            members = sorted(grant.members)
            self._breach(where, f"ring {sorted(ring)}", f"of the members {members} of epoch {row['epoch']}")
        elif grant.wanted not in (None, row["units_wanted"]):
            self._breach(where, f"units_wanted {row['units_wanted']}", f"{grant.wanted}, as {grant.where} has")
        elif not contributors <= (grant.contributors or contributors):
            self._breach(
                where,
                f"contributors {sorted(contributors)}",
                f"of {sorted(grant.contributors)}, who were to contribute",
            )
        elif not fits(grant):
            ranks = {replica: grant.ranks[replica] for replica in sorted(widths) if replica in grant.ranks}
            self._breach(where, f"ranks {dict(sorted(widths.items()))}", f"{ranks}, as {grant.where} has")

    def _check_awaited(self) -> None:
        """Report states on which commits or grants build, and of which no replica logged a commit."""
        if self.found.lost:
            return
        for where, own in self._awaited.values():
            self._breach(where, "built on a state that no replica committed", f"{own}, which it committed before")
        for grant in self._bases.values():
            if grant.used and grant.base[1] >= (self._first_step or 0):
                self._breach(grant.where, f"a grant on step {grant.base[1]}", "a base that was committed")

    # The end.

    def _check_ends(self) -> None:
        """Check that equal states have equal digests, each unit was trained once, metrics.jsonl is complete."""
        run, finals = self._run, finals_of(self._run)
        digests: dict[tuple[Any, ...], tuple[int, str]] = {}
        for replica, final in finals.items():
            where, state = self._name(run.final(replica)), (final["commit_epoch"], final["step"], final["lineage"])
            other, digest = digests.setdefault(state, (replica, final["digest"]))
            if digest != final["digest"]:
                self._breach(where, f"digest {final['digest']}", f"{digest}, as replica {other} at the same state")
            if final.get("config_hash", self._config) != self._config:
                self._breach(where, f"config_hash {final['config_hash']}", f"{self._config}, of config.yaml")
        units = self._tally.audit.result()
        for name in ("duplicated", "skipped"):
            if units[name]:
                self._breach("replicas/*/fed.jsonl", f"{units[name]} units {name}", "each exactly once")
        if self.found.lost:
            return
        end, last = newest_final(finals.values()), self._last
        if end is not None and last is not None and end["step"] < last["step"] and not end.get("of_job", True):
            end = None  # its replica has left before, for good
        if end is not None and last is not None and end["lineage"] != last["lineage"]:
            at = f"step {end['step']}, lineage {end['lineage']} at the end"
            self._breach(
                "replicas/*/final.json", at, f"step {last['step']}, lineage {last['lineage']}, as the logs"
            )
        self._summary(finals)

    def _summary(self, finals: dict[int, Row]) -> None:
        """Check that summary.json has the figures that the logs add up to."""
        written = read_json(self._run.summary)
        if written is None:
            if self._whole and self._run.metrics.exists():
                self._breach("summary.json", "none", "the figures of the run")
            return
        counted = json.loads(json.dumps(self._tally.summary(finals, written.get("lost", ()))))
        for key in SUMMED:
            there, wanted = written.get(key), counted.get(key)
            same = there == wanted
            if isinstance(wanted, float) and isinstance(there, int | float):
                same = abs(there - wanted) <= 1e-6 * max(1.0, abs(wanted))
            if not same:
                self._breach("summary.json", f"{key} {there}", f"{wanted}, by the logs")
