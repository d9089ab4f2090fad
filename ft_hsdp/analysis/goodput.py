"""Goodput: how much of the time trained the model, and where the rest went. Pure; memory does not grow.

`wall_clock` is FT-HSDP's figure (section 6.1) and summary.json's: sum over steps of (median fault-free step x
contributors / total), over the wall time since the first step. Steps that are done twice count there each time,
as in the paper; `with_replay` counts them once. `renewal` is what failures alone cost: t / (t + lost), with t the
training between two failures and lost what one of them takes away, both in seconds at full strength.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

CAUSES = ("startup", "detect", "quorum", "reconnect", "fetch", "missing", "replay", "ftar", "commit", "other")
WAITS = ("quorum", "commit", "ftar")  # the surest first
MEANT = ("done", "stopped", "left")  # ends of an incarnation that are no failures
BY_FAILURES = ("detect", "quorum", "reconnect", "fetch", "missing")
BINS_PER_OCTAVE = 128  # of the histogram of steps: a median is exact to 0.6 %, or wholly while bins hold one value
LEARN = 4  # of so many usual steps one says what a usual step waits for
SMOOTH = 0.1  # its weight


class Median:
    """A running median of positive seconds from a histogram with logarithmic bins."""

    def __init__(self) -> None:
        self._bins: dict[int, tuple[int, float]] = {}  # number and sum of what is inside
        self._count = 0
        self._at = 0  # how many were counted when `_value` was found
        self._value = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        key = int(math.log2(value if value > 1e-6 else 1e-6) * BINS_PER_OCTAVE)
        count, total = self._bins.get(key, (0, 0.0))
        self._bins[key] = (count + 1, total + value)
        self._count += 1

    def near(self) -> float:
        """The median, at most 1 % of the values behind; cheap."""
        if self._count > self._at * 1.01:
            self._value, self._at = self.exact(), self._count
        return self._value

    def exact(self) -> float:
        """The median; 0.0 of nothing."""
        low, high = (self._count - 1) // 2, self._count // 2
        passed, found = 0, []
        for key in sorted(self._bins):
            count, total = self._bins[key]
            found += [total / count for n in (low, high) if passed <= n < passed + count]
            passed += count
        return sum(found) / 2 if found else 0.0


class StepTimes:
    """How long steps take, and how much of the replicas contributed to them."""

    def __init__(self) -> None:
        self._whole, self._any = Median(), Median()  # steps of all replicas that were wanted, and of fewer
        self._first: tuple[float, float] | None = None  # t and step_s of the first commit
        self._last = 0.0  # t of the newest commit
        self.share = 0.0  # sum of contributors / total

    def add(self, row: Mapping[str, Any]) -> tuple[float, float]:
        """Take a commit; return contributors / total, and the seconds since the commit before."""
        t, step_s, contributors, total = row["t"], row["step_s"], len(row["contributors"]), row["total"]
        (self._whole if contributors >= total else self._any).add(step_s)
        share = min(1.0, contributors / total)
        self.share += share
        if self._first is None:
            self._first, self._last = (t, step_s), t - step_s
        gap = max(0.0, t - self._last)
        self._last = max(self._last, t)
        return share, gap

    @property
    def median(self) -> float:
        """The median step of all replicas that were wanted, in seconds; of any as long as there is none."""
        return self._whole.exact() or self._any.exact()

    @property
    def typical(self) -> float:
        """The same, at most 1 % of the commits behind; cheap."""
        return self._whole.near() or self._any.near()

    @property
    def startup_s(self) -> float:
        """What the first step took longer than a median one, in seconds."""
        return 0.0 if self._first is None else max(0.0, self._first[1] - self.median)

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the first step to the newest commit."""
        return 0.0 if self._first is None else float(self._last - self._first[0] + self._first[1])

    @property
    def trained_s(self) -> float:
        """Seconds of training of all replicas: the median step, for each step times contributors / total."""
        return self.median * self.share


def fault_free_step(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the median time in seconds of a step to which all wanted replicas contributed, or else of any."""
    steps = StepTimes()
    for row in rows:
        steps.add(row)
    return steps.median


class Goodput:
    """Takes canonical commits and events, one at a time, in about the order of their times."""

    def __init__(self) -> None:
        self.steps = StepTimes()
        self.commits = 0
        self.failures = 0
        self._missing = 0.0  # of fewer contributors, at the usual step of then
        self._share_again = 0.0  # sum of contributors / total of repeated steps
        self._highest = 0
        self._lost: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self._usual: dict[str, float] = {}  # exposed waits of a usual step
        self._seen: list[str] = []  # incarnations whose end was counted
        self._marks: dict[str, float] = {}  # since the last commit: what happened, when first

    def event(self, row: Mapping[str, Any]) -> None:
        """Take an event."""
        name, t = row["event"], row["t"]
        mark = _MARKS.get(name)
        if mark is not None:
            if mark == "connected":
                self._marks[mark] = max(t, self._marks.get(mark, t))
            else:
                self._marks.setdefault(mark, t)
        if name == "ReplicaExited" and row.get("kind") not in MEANT:
            who = str(row.get("incarnation"))
            if who not in self._seen:
                self._seen = [*self._seen[-63:], who]
                self.failures += 1

    def commit(self, row: Mapping[str, Any]) -> tuple[float, float]:
        """Take a commit; (useful seconds of it at full strength, seconds since the commit before)."""
        step = row["step"]
        share, gap = self.steps.add(row)
        self.commits += 1
        if step <= self._highest:
            self._share_again += share
        else:
            self._highest = step
        typical = self.steps.typical
        excess = gap - typical
        if self.commits == 1:
            pass  # its excess is the startup, to be found when the usual step is known
        elif self._marks or excess > 0.1 * typical:
            self._account(excess, row["t"], row["waits"])
        elif self.commits % LEARN == 0:
            self._learn(row["waits"])
        if self._marks:
            self._marks = {}
        self._missing += typical * (1.0 - share)
        return typical * share, gap

    def effective(self) -> dict[str, Any]:
        """The picture's "effective"; the lost seconds add up to wall_s - useful_s."""
        if not self.commits:
            return {
                "wall_clock": 0.0,
                "renewal": None,
                "with_replay": 0.0,
                "wall_s": 0.0,
                "useful_s": 0.0,
                "lost_s": {},
            }
        steps = self.steps
        replay = steps.median * self._share_again
        wall, trained = max(steps.wall_s, 1e-9), steps.trained_s
        useful = trained - replay
        lost = self._lost | {
            "startup": steps.startup_s,
            "missing": self._missing,
            "replay": replay,
        }
        whole = max(0.0, wall - useful)
        named = sum(lost.values())
        if named > whole:  # steps that were faster than the median pay for others
            missing = min(lost["missing"], whole)
            rest = (whole - missing) / max(named - lost["missing"], 1e-9)
            lost = {cause: seconds * rest for cause, seconds in lost.items()} | {"missing": missing}
        else:
            lost["other"] += whole - named
        by_failures = sum(lost[cause] for cause in BY_FAILURES)
        return {
            "wall_clock": min(1.0, trained / wall),
            "renewal": trained / (trained + by_failures) if self.failures and trained else None,
            "with_replay": min(1.0, useful / wall),
            "wall_s": wall,
            "useful_s": useful,
            "lost_s": lost,
        }

    def _learn(self, waits: Mapping[str, float]) -> None:
        """What a usual step waits for."""
        for cause in WAITS:
            seconds = waits.get(cause, 0.0)
            old = self._usual.get(cause, seconds)
            self._usual[cause] = old + SMOOTH * (seconds - old)

    def _account(self, excess: float, t: float, waits: Mapping[str, float]) -> None:
        """Share out what a step took more than a usual one: to the phases of a change of membership that fell into
        it, then to waits that were longer than usual. What nothing explains is found at the end."""
        for cause, seconds in _phases(self._marks, t):
            put = min(max(excess, 0.0), seconds)
            self._lost[cause] += put
            excess -= put
        for cause in WAITS:
            longer = waits.get(cause, 0.0) - self._usual.get(cause, 0.0)
            put = min(max(excess, 0.0), max(longer, 0.0))
            self._lost["fetch" if cause == "commit" and "fetching" in self._marks else cause] += put
            excess -= put


_MARKS = {
    "FailureInjected": "failed",
    "RingBroken": "seen",
    "ProcessExited": "seen",
    "ExitReported": "seen",
    "ReplicaExcluded": "seen",
    "EpochGranted": "granted",
    "RingConnected": "connected",
    "FetchStarted": "fetching",
}


def _phases(marks: Mapping[str, float], t: float) -> list[tuple[str, float]]:
    """(cause, seconds) of the phases before the commit at ``t``, the surest first."""
    granted, seen, failed = marks.get("granted"), marks.get("seen"), marks.get("failed")
    found = []
    if seen is not None and granted is not None:
        found.append(("quorum", max(0.0, granted - seen)))
    if failed is not None and seen is not None:
        found.append(("detect", max(0.0, seen - failed)))
    if granted is not None:
        found.append(("reconnect", max(0.0, min(t, marks.get("connected", t)) - granted)))
    return found
