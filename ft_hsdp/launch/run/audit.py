"""The audit of units: which ones were trained once, twice or never. Pure.

It compares the units that canonical commits list with those that replicas logged when they fed them to the model.
All data ranks of a replica train a micro-batch together, so the audit counts micro-batches, each of as many units
as there are data ranks; where replicas may go on with fewer ranks (`memory.shrink_to`), it counts units. It takes
rows one at a time and keeps only the newest; the others are ranges of numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.launch.run.directory import Row

WINDOW = 1000  # steps for which a line of fed.jsonl waits for its commit
SLACK_S = 1.0  # largest difference between the clocks of a job's machines

Feed = tuple[int, int, int, int]
"""replica, step, data shard, number of the micro-batch there."""


class Spans:
    """A set of whole numbers, stored as ranges; it is small if most numbers follow each other."""

    def __init__(self) -> None:
        self._from: list[int] = []
        self._to: list[int] = []  # exclusive

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._from, number) - 1
        return at >= 0 and number < self._to[at]

    def __len__(self) -> int:
        return sum(self._to) - sum(self._from)

    def __iter__(self) -> Iterator[int]:
        for first, end in zip(self._from, self._to, strict=True):
            yield from range(first, end)

    def add(self, number: int) -> bool:
        """Add a number; return False if it is in the set already."""
        at = bisect_right(self._from, number)
        if at and number < self._to[at - 1]:
            return False
        below, above = at > 0 and self._to[at - 1] == number, at < len(self._from) and self._from[at] == number + 1
        if below and above:
            self._to[at - 1] = self._to.pop(at)
            del self._from[at]
        elif below:
            self._to[at - 1] += 1
        elif above:
            self._from[at] = number
        else:
            self._from.insert(at, number)
            self._to.insert(at, number + 1)
        return True

    def absent(self, first: int, end: int) -> Iterator[int]:
        """Yield the numbers from ``first`` up to, but without, ``end`` that are not in the set."""
        for a, b in pairwise([(first, first), *zip(self._from, self._to, strict=True), (end, end)]):
            yield from range(max(first, a[1]), min(end, b[0]))


class UnitAudit:
    """The units of a run. It takes each replica's lines in the order of its log, and canonical commits by step.

    A unit is trained if a canonical commit lists it *and* its replica logged for that same step that it fed it.
    So the ledger is checked against the units that the model really got. A resumed run begins with the ledger
    before its first step. A unit that is in a hole of the last ledger is not counted as skipped. If the line of a
    unit may have been lost, with its machine or because a disk was full, the unit is `unlogged`: neither trained
    nor skipped. So are the units of a commit whose line may have been lost: the ledger after it counts them.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks  # data ranks of a replica; 1 if their number changes, so that units are counted
        self._fed: dict[int, set[Feed]] = {}  # by step: lines that wait for their commit
        self._logged: dict[int, dict[int, tuple[int, int]]] = {}  # replica -> restarts -> lowest and highest step
        self._trained: dict[int, Spans] = {}  # by data shard
        # Below, numbers are those of micro-batches in a data shard.
        self._listed: dict[int, int] = {}  # data shard -> the highest number that commits list
        self._twice: set[tuple[int, int]] = set()  # data shard and number
        self._open: dict[Feed, tuple[float, float]] = {}  # listed by commits without a line: fed after, before
        self._gaps: list[tuple[Row, Row]] = []  # commits around steps of which no replica logged a commit
        self._given_up: set[tuple[int, int]] = set()  # data shard and number
        self._cut: list[str] = []  # incarnations whose last lines were lost with their machine
        self._losses: list[tuple[float, float]] = []  # Unix times between which a disk lost lines
        self._first: Row | None = None  # canonical commit
        self._last: Row | None = None

    @property
    def steps(self) -> int:
        """Return the newest step of a canonical commit; 0 without commits."""
        return self._last["step"] if self._last else 0

    @property
    def awaited(self) -> int:
        """Return the number of units that commits list and no line has so far."""
        return len(self._open) * self._ranks

    def fed(self, replica: int, line: Row) -> None:
        """Add a line of a replica's fed.jsonl, which it writes before each forward pass."""
        logged, restarts = self._logged.setdefault(replica, {}), _replica_and_restarts(line["incarnation"])[1]
        low, high = logged.get(restarts, (line["step"], line["step"]))
        logged[restarts] = min(low, line["step"]), max(high, line["step"])
        for shard, number in self._split([(line["shard"], line["index"], line["units"])]):
            feed = (replica, line["step"], shard, number)
            if self._open.pop(feed, None) is not None:
                self._train(feed)
            elif line["step"] > self.steps - WINDOW:
                self._fed.setdefault(line["step"], set()).add(feed)

    def again(self) -> None:
        """Drop commits and lines, which are added again from the first one on. Events stay."""
        self._fed, self._logged, self._trained, self._listed = {}, {}, {}, {}
        self._twice, self._open, self._gaps, self._given_up = set(), {}, [], set()
        self._first = self._last = None

    def event(self, event: Row) -> None:
        if event["event"] == "LogCut" and event["rank"] == 0:
            self._cut.append(event["incarnation"])  # rank 0 writes fed.jsonl
        elif event["event"] == "LogLinesLost":
            self.lost(event["since"] if "since" in event else event["t"], event["t"])

    def lost(self, since: float, until: float) -> None:
        """Add a time in which a disk lost lines; ``since`` and ``until`` are in Unix seconds."""
        if self._losses and since <= self._losses[-1][1] + SLACK_S and until >= self._losses[-1][0]:
            since, until = min(since, self._losses[-1][0]), max(until, self._losses.pop()[1])
        self._losses.append((since, until))

    def commit(self, row: Row) -> None:
        """Add the next canonical commit."""
        step = row["step"]
        if self._last is not None and step > self._last["step"] + 1:
            self._gaps.append((_brief(self._last), _brief(row)))
        self._first, self._last = self._first or row, row
        self._given_up |= set(self._split(row.get("given_up") or ()))
        fed = self._fed.get(step, set())
        for c in row["contributions"]:
            for shard, number in self._split([(c["shard"], c["index"], c["units"])]):
                self._listed[shard] = max(number, self._listed.get(shard, -1))
                feed = (c["replica"], step, shard, number)
                if feed in fed:
                    self._train(feed)
                else:
                    self._open[feed] = row["t"] - row["step_s"], row["t"]
        self._fed.pop(step - WINDOW, None)
        if step % WINDOW == 0:  # a gap leaves steps that the line above never pops
            self._fed = {at: feeds for at, feeds in self._fed.items() if at > step - WINDOW}

    def result(self) -> dict[str, int]:
        """Return the numbers of units that were trained, duplicated and skipped.

        The keys given_up (their gradients were not finite) and unlogged are there only if there are such units.
        """
        unlogged: set[tuple[int, int]] = set()
        twice = set(self._twice)
        gaps = {replica: self._cuts(replica) for replica in {feed[0] for feed in self._open}}
        for (replica, step, shard, number), (since, until) in self._open.items():
            cut = any(after < step < before for after, before in gaps[replica])
            if not cut and not self._dark(since, until):
                continue
            if number in self._trained.get(shard, ()) or (shard, number) in unlogged:
                twice.add((shard, number))
            unlogged.add((shard, number))
        for before, after in self._gaps:
            if self._dark(before["t"], after["t"]) or self._cut_between(before, after):
                unlogged |= set(self._between(before, after))
        holes = set(self._split(self._last["holes"])) if self._last else set()
        skipped = 0
        for shard in self._listed:
            known = {number for s, number in unlogged | holes | self._given_up if s == shard}
            skipped += sum(number not in known for number in self._untrained(shard))
        bare = sum(number not in self._trained.get(shard, ()) for shard, number in unlogged)
        trained = sum(map(len, self._trained.values()))
        found = {"trained": trained, "duplicated": len(twice), "skipped": skipped}
        found |= {"given_up": len(self._given_up)} if self._given_up else {}
        found |= {"unlogged": bare} if unlogged else {}
        return {what: count * self._ranks for what, count in found.items()}

    def _split(self, runs: Iterable[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Yield the micro-batches (data shard, number) of runs of units."""
        for shard, first, count in runs:
            for number in range(first // self._ranks, -(-(first + count) // self._ranks)):
                yield shard, number

    def _train(self, feed: Feed) -> None:
        if not self._trained.setdefault(feed[2], Spans()).add(feed[3]):
            self._twice.add(feed[2:])

    def _untrained(self, shard: int) -> Iterator[int]:
        """Yield the micro-batches of a data shard that were trained neither before the first step nor since."""
        assert self._first is not None
        first, end, trained = self._first, self._listed[shard] + 1, self._trained.get(shard, Spans())
        if first["step"] == 1:
            yield from trained.absent(0, end)
            return
        own = self._split((c["shard"], c["index"], c["units"]) for c in first["contributions"])
        left = {number for s, number in (*own, *self._split(first["holes"])) if s == shard}
        yield from (number for number in sorted(left) if number not in trained)
        cursor = first["cursors"][shard] // self._ranks
        yield from (number for number in trained.absent(cursor, end) if number not in left)

    def _between(self, before: Row, after: Row) -> Iterator[tuple[int, int]]:
        """Yield the micro-batches that the cursors passed between two commits."""
        own = set(self._split((c["shard"], c["index"], c["units"]) for c in after["contributions"]))
        for shard in self._listed:
            if shard < min(len(before["cursors"]), len(after["cursors"])):
                low, high = (row["cursors"][shard] // self._ranks for row in (before, after))
                yield from ((shard, number) for number in range(low, high) if (shard, number) not in own)

    def _cuts(self, replica: int) -> list[tuple[int, float]]:
        """Return the steps (after, before) between which a replica may have lost lines.

        They lie between the last line of an incarnation whose log was cut, or of an earlier one, and the first
        line of a later one.
        """
        logged, found = self._logged.get(replica, {}), []
        for of, restarts in map(_replica_and_restarts, self._cut):
            if of == replica:
                after = max((high for n, (_, high) in logged.items() if n <= restarts), default=0)
                before = min((low for n, (low, _) in logged.items() if n > restarts), default=math.inf)
                found.append((after, before))
        return found

    def _cut_between(self, before: Row, after: Row) -> bool:
        """Return whether one replica logged two commits, and its log was cut between them."""
        of, first = _replica_and_restarts(before["incarnation"])
        same, last = _replica_and_restarts(after["incarnation"])
        cuts = map(_replica_and_restarts, self._cut)
        return of == same and any(replica == of and first <= restarts < last for replica, restarts in cuts)

    def _dark(self, since: float, until: float) -> bool:
        """Return whether a disk lost lines between two Unix times."""
        return any(since - SLACK_S <= b and a <= until + SLACK_S for a, b in self._losses)


def _brief(row: Row) -> Row:
    return {key: row[key] for key in ("t", "cursors", "contributions", "incarnation")}


def _replica_and_restarts(incarnation: str) -> tuple[int, int]:
    """Return the replica and the number of restarts in the name of an incarnation; zeros if it is not a name."""
    name = IncarnationId.parse(incarnation)
    return (0, 0) if name is None else (name.replica, name.restarts)
