"""Alarms: what of a job needs people, found in its rows and in a look at its overview each second. Pure.

Each rule has conditions, one per subject: a replica, a file, or the whole job. A condition that begins is told
once, and once more when it ends. One that comes and goes is told at most once in `AGAIN_S`; the next text says how
often it came meanwhile.

A lighthouse that begins knows of no alarm. Rows from before it count for nothing, so that they are not told twice.
What must last, such as a missing replica, lasts from its first look on: if it still holds, it is told once more.
An alarm that ended while no lighthouse led gets no end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from ft_hsdp.event_table import fault, is_over, tell
from lighthouse.overview.overview import Overview

STALL_S, STALL_STEPS = 60.0, 10.0  # without a commit: the longer of this, and so many usual steps
START_S = 600.0  # the same before the first commit of a job
LASTING_S = 60.0  # how long replicas are missing, or a state is not protected
FAILURES, FAILURES_S = 3, 600.0  # so many of a replica within this time
DEVIATIONS = 8.0  # of a loss above the median of those before it
FLAT = 1e-3  # a deviation is at least this share of the median: losses may be all the same
LOSSES, LEAST = 64, 16  # losses that are compared with, and without how many nothing is compared
CALM = 16  # usual losses after which an unusual one is over
AGAIN_S = 300.0  # between two times that one condition is told
HELD_S = 600.0  # how long an event counts that has no end of its own
MAX_TEXT = 300  # characters of what a row says


class Alarm(NamedTuple):
    """What people are told: that a condition has begun, or has ended."""

    rule: str
    subject: str  # of the rule: "job", "replica 3", "replica 3 rank 1", "store", ...
    raised: bool  # False: it is over
    text: str
    t: float  # Unix seconds


class Facts(NamedTuple):
    """What one look at the overview finds."""

    t: float  # Unix seconds
    trains: bool  # the job should train now
    paused: bool  # a training loop says that it does something else (`Job.pause`)
    commits: int  # so far
    step: int  # of the newest commit
    typical: float  # a fault-free step, in seconds
    wanted: int  # replicas
    missing: tuple[int, ...]  # those of them that neither contribute nor stand by
    unprotected: str  # why the newest state is not protected; "": it is, or nobody knows
    failures: tuple[tuple[int, int, str], ...]  # number of the row, replica and kind of each that is kept

    @staticmethod
    def of(overview: Overview, paused: bool, t: float) -> Facts:
        wanted = [lane for lane in overview.lanes.settle() if not (lane.beyond or lane.drained)]
        head, protected = overview.head(), overview.protection.newest()
        done = overview.ended is not None or head["step"] >= overview.about.steps
        there = set(head["contributors"]) | {lane.replica for lane in wanted if lane.state == "standby"}
        return Facts(
            t,
            bool(wanted) and not done,
            paused,
            overview.goodput.commits,
            head["step"],
            overview.goodput.steps.typical,
            len(wanted),
            tuple(lane.replica for lane in wanted if lane.replica not in there) if head["contributors"] else (),
            (protected.why or "too few copies") if protected.word == "unprotected" else "",
            tuple((f.seq, f.replica, f.kind) for f in overview.failures.all if f.lost),
        )


@dataclass(slots=True)
class _Condition:
    on: bool = False
    told: bool = False  # people know that it has begun, and not yet that it is over
    text: str = ""
    came: int = 0  # how often it has begun since it was told last
    again: float = -math.inf  # before then it is not told again
    until: float = math.inf  # then it is over by itself


class Alarms:
    """Takes rows as they come, and facts each second. ``now`` is in monotonic seconds: the wall clock may jump."""

    def __init__(self, now: float) -> None:
        self._conditions: dict[tuple[str, str], _Condition] = {}
        self._commits = -1
        self._moved = now  # when the newest step was committed, or none had to be
        self._since: dict[str, float] = {}  # by rule: from when on its condition holds
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._calm = 0
        self._seen: dict[int, float] | None = None  # by the row of a failure: when it was first seen

    def take(self, kind: str, row: Mapping[str, Any], now: float) -> list[Alarm]:
        """Take a row of the journal; return what people are to be told."""
        if kind == "commit":
            return self._loss(row, now)
        if kind != "event":
            return []
        name, replica, rank = row["event"], row.get("replica"), row.get("rank")
        who = "job" if replica is None else f"replica {replica}" + ("" if rank is None else f" rank {rank}")
        found = {
            "JobHalted": ("halted", "job"),
            "CulpritFound": ("culprit", who),
            "ClockOff": ("clock", f"host {row.get('host')}"),
            "StoreFailed": ("disk", "store"),
            "LogLinesLost": ("disk", f"logs of {who}"),
            "CheckpointFailed": ("disk", "checkpoint"),
            "CheckpointWritten": ("disk", "checkpoint"),
        }.get(name)
        if found is None or (name == "CheckpointFailed" and "replicas" in row):  # no disk: a replica was lost
            return []
        on = not is_over(row) and name != "CheckpointWritten"
        held = now + HELD_S if name == "LogLinesLost" else math.inf
        return self._set(*found, on, tell(row)[:MAX_TEXT], now, row["t"], held)

    def look(self, facts: Facts, now: float) -> list[Alarm]:
        """Take what the overview shows now; return what people are to be told."""
        told = [alarm for key in list(self._conditions) for alarm in self._settle(*key, "", now, facts.t)]
        ended = "" if facts.trains else "the job has ended, or nothing is to train"
        for rule, subject, on, text in (
            ("stall", "job", *self._stall(facts, now)),
            ("replicas", "job", *self._missing(facts, now)),
            ("protection", "job", *self._unprotected(facts, now)),
            *(("restarts", f"replica {r}", *found) for r, found in self._restarts(facts, now).items()),
        ):
            told += self._set(rule, subject, on, text if on else ended or text, now, facts.t)
        return told

    def _stall(self, facts: Facts, now: float) -> tuple[bool, str]:
        if facts.commits != self._commits or facts.paused or not facts.trains:
            self._commits, self._moved = facts.commits, now
        still = now - self._moved
        if still < (max(STALL_S, STALL_STEPS * facts.typical) if facts.commits else START_S):
            return False, f"the newest committed step is {facts.step}"
        usual = f"; a step usually takes {facts.typical:.3g} s" if facts.commits else ""
        return True, f"no commit was heard of for {still:.0f} s; the newest is step {facts.step}{usual}"

    def _missing(self, facts: Facts, now: float) -> tuple[bool, str]:
        if not self._lasts("replicas", bool(facts.missing) and facts.trains, now):
            return False, f"all {facts.wanted} replicas contribute"
        names = ", ".join(map(str, facts.missing))
        there = facts.wanted - len(facts.missing)
        return True, f"{there} of {facts.wanted} replicas contribute for {LASTING_S:.0f} s; missing: {names}"

    def _unprotected(self, facts: Facts, now: float) -> tuple[bool, str]:
        if not self._lasts("protection", bool(facts.unprotected) and facts.trains, now):
            return False, "the state is protected again"
        return True, f"a lost host may take the only copy of the state with it: {facts.unprotected[:MAX_TEXT]}"

    def _restarts(self, facts: Facts, now: float) -> dict[int, tuple[bool, str]]:
        seen, begun = self._seen or {}, -math.inf if self._seen is None else now
        self._seen = {seq: seen.get(seq, begun) for seq, _, _ in facts.failures}
        found = {}
        for replica in {replica for _, replica, _ in facts.failures}:
            kinds = [
                kind for seq, r, kind in facts.failures if r == replica and now - self._seen[seq] < FAILURES_S
            ]
            last = f"; the last time it {fault(kinds[-1])}" if kinds else ""
            said = f"replica {replica} failed {len(kinds)} times in {FAILURES_S / 60:.0f} minutes{last}"
            found[replica] = len(kinds) >= FAILURES, said
        return found

    def _loss(self, row: Mapping[str, Any], now: float) -> list[Alarm]:
        loss, before = row.get("loss"), tuple(self._losses)
        odd, text = loss is None and bool(before), f"the loss of step {row['step']} is no finite number"
        if loss is not None and len(before) >= LEAST:
            middle = median(before)
            spread = 1.4826 * median(abs(each - middle) for each in before)
            odd = loss - middle > DEVIATIONS * max(spread, FLAT * abs(middle))
            text = (
                f"the loss of step {row['step']} is {loss:.4g}; the median of the {len(before)} before it is "
                f"{middle:.4g}, their robust deviation {spread:.2g}"
            )
        if loss is not None:
            self._losses.append(loss)
        self._calm = 0 if odd else self._calm + 1
        if not odd and self._calm < CALM:
            return []
        return self._set("loss", "job", odd, text if odd else f"{CALM} losses are usual again", now, row["t"])

    def _lasts(self, rule: str, holds: bool, now: float) -> bool:
        if not holds:
            self._since.pop(rule, None)
            return False
        return now - self._since.setdefault(rule, now) >= LASTING_S

    def _set(
        self, rule: str, subject: str, on: bool, text: str, now: float, t: float, until: float = math.inf
    ) -> list[Alarm]:
        """Note whether a condition holds; ``text`` says that it does, or that it is over."""
        condition = self._conditions.setdefault((rule, subject), _Condition())
        condition.came += on and not condition.on
        condition.on, condition.until = on, until
        condition.text = text if on else condition.text
        return self._settle(rule, subject, text, now, t)

    def _settle(self, rule: str, subject: str, text: str, now: float, t: float) -> list[Alarm]:
        """Return what is to be told of a condition now, if anything."""
        condition = self._conditions[rule, subject]
        if now >= condition.until:
            condition.on, condition.until = False, math.inf
            text = f"it did not happen again for {HELD_S / 60:.0f} minutes"
        if condition.on and not condition.told and now >= condition.again:
            often = f" (it began {condition.came} times since the last alert)" if condition.came > 1 else ""
            condition.told, condition.again, condition.came = True, now + AGAIN_S, 0
            return [Alarm(rule, subject, True, condition.text + often, t)]
        if condition.told and not condition.on:
            condition.told = False
            return [Alarm(rule, subject, False, text, t)]
        return []
