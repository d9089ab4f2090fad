"""Goodput: how much of the time trained the model, and where the rest went. Pure; memory does not grow.

`StepTimes` has the effective training time of FT-HSDP §6.1: the sum over steps of (median fault-free step x
share). The share of a step is units / wanted units, which is contributors / total while the batch adapts. The page
and summary.json divide the sum by the wall time since the first step. `Goodput` adds what only the page shows. Its
`wall_clock` counts a step that is done twice each time, as the paper does; `with_replay` counts it once.
`renewal` is what failures alone cost: t / (t + lost), with t the training between two failures and lost what one
failure takes away, both in seconds of all replicas.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from ft_hsdp.event_table import EVENTS

FAILURES = ("startup", "detect", "quorum", "reconnect", "fetch", "missing", "replay")
CAUSES = (*FAILURES, "evaluation", "ftar", "commit", "other")
ML_GOODPUT: Mapping[str, str] = {
    "startup": "PROGRAM_STARTUP",
    "detect": "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "quorum": "ELASTIC_SLICE_DOWN",
    "reconnect": "ELASTIC_REINITIALIZATION",
    "fetch": "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "replay": "WASTED_PROGRESS_FROM_DISRUPTION",
    "evaluation": "CUSTOM_BADPUT_EVENTS",
}
"""What ml-goodput-measurement 0.2.3 calls a cause. Others are OTHER, but "missing" is its slice efficiency."""

WAITS = ("evaluation", "quorum", "commit", "ftar")  # the surest cause first
MEANT = ("done", "stopped", "left")  # planned ends of an incarnation
BY_FAILURES = ("detect", "quorum", "reconnect", "fetch", "missing")
BINS_PER_OCTAVE = 128  # of the histogram of steps: a median is exact to 0.6 %, or wholly while bins hold one value
LEARN = 4  # one in so many usual steps updates the waits of a usual step
SMOOTH = 0.1  # with this weight
LOSSES = 512  # newest ones whose costs are kept


class Median:
    """A running median of positive seconds from a histogram with logarithmic bins."""

    def __init__(self) -> None:
        self._bins: dict[int, tuple[int, float]] = {}  # number and sum of the values in each
        self._count = 0
        self._at = 0  # `_count` when `_value` was computed
        self._value = 0.0

    def add(self, value: float) -> None:
        key = int(math.log2(value if value > 1e-6 else 1e-6) * BINS_PER_OCTAVE)
        count, total = self._bins.get(key, (0, 0.0))
        self._bins[key] = (count + 1, total + value)
        self._count += 1

    def near(self) -> float:
        """Return the median of all but the newest 1 % of the values; cheap."""
        if self._count > self._at * 1.01:
            self._value, self._at = self.exact(), self._count
        return self._value

    def exact(self) -> float:
        low, high = (self._count - 1) // 2, self._count // 2
        passed, found = 0, []
        for key in sorted(self._bins):
            count, total = self._bins[key]
            found += [total / count for n in (low, high) if passed <= n < passed + count]
            passed += count
        return sum(found) / 2 if found else 0.0


class StepTimes:
    """How long steps take, and how much of the wanted batch they train."""

    def __init__(self) -> None:
        self._whole, self._any = Median(), Median()  # steps of all replicas that were wanted, and of fewer
        self._first: tuple[float, float] | None = None  # t and step_s of the first commit
        self._last = 0.0  # t of the newest commit
        self.share = 0.0  # sum over the steps

    def add(self, row: Mapping[str, Any]) -> tuple[float, float]:
        """Take a commit; return its share of the wanted units, and the seconds since the commit before."""
        t, step_s = row["t"], row["step_s"]
        (self._whole if len(row["contributors"]) >= row["total"] else self._any).add(step_s)
        share = share_of(row)
        self.share += share
        if self._first is None:
            self._first, self._last = (t, step_s), t - step_s
        gap = max(0.0, t - self._last)
        self._last = max(self._last, t)
        return share, gap

    @property
    def median(self) -> float:
        """Return the median step in seconds: of those with all wanted replicas, or of any if there are none."""
        return self._whole.exact() or self._any.exact()

    @property
    def whole_seen(self) -> bool:
        """Return whether all wanted replicas contributed to any step."""
        return self._whole.near() > 0

    @property
    def typical(self) -> float:
        """Return the same of all but the newest 1 % of the commits; cheap."""
        return self._whole.near() or self._any.near()

    @property
    def startup_s(self) -> float:
        return 0.0 if self._first is None else max(0.0, self._first[1] - self.median)

    @property
    def wall_s(self) -> float:
        return 0.0 if self._first is None else float(self._last - self._first[0] + self._first[1])

    @property
    def began(self) -> float:
        """Return when the first step would have begun if it were a usual one, in Unix seconds."""
        return self._last - self.wall_s + self.startup_s

    @property
    def trained_s(self) -> float:
        """Return the effective training time: the sum of median step x share, in seconds."""
        return self.median * self.share


def share_of(row: Mapping[str, Any]) -> float:
    """Return units / wanted units of a commit, 1.0 at most; contributors / total of a row without units."""
    units, wanted = row.get("units"), row.get("units_wanted")
    if units is None or not wanted:
        units, wanted = len(row["contributors"]), row["total"]
    return min(1.0, float(units / wanted))


class Goodput:
    """The effective training time of a job, and causes of the lost time.

    It takes canonical commits and events, one at a time, in about the order of their times.
    """

    def __init__(self) -> None:
        self.steps = StepTimes()
        self.commits = 0
        self._missing = 0.0  # lost by absent contributors, at the usual step of that time
        self._share_again = 0.0  # sum of the shares of repeated steps
        self._highest = 0
        self._stepping_s, self._present_s = 0.0, 0.0  # since the first commit; times the part that contributed
        self._deviation_s = 0.0  # of the newest step
        self.stalls: deque[dict[str, float]] = deque(maxlen=LOSSES)  # extra seconds of a step that lost a replica
        self.restarts: deque[float] = deque(maxlen=LOSSES)  # the same after the loss of all
        self.joins: dict[str, float] = {}  # of steps in which replicas joined
        self.calm_s, self.calm = 0.0, 0  # sum and number of whole steps in which nothing happened
        self._before: frozenset[int] = frozenset()  # contributors of the newest commit
        self._gone: set[int] = set()  # replicas that have failed since
        self._lost: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self._usual: dict[str, float] = {}  # exposed waits of a usual step, in seconds
        self._marks: dict[str, float] = {}  # what happened since the last commit, and when first

    def event(self, row: Mapping[str, Any]) -> None:
        name, t = row["event"], row["t"]
        mark = EVENTS[name].mark if name in EVENTS else ""
        if mark:
            if mark == "connected":
                self._marks[mark] = max(t, self._marks.get(mark, t))
            else:
                self._marks.setdefault(mark, t)
        if name == "ReplicaExited" and row.get("kind") not in MEANT:
            self._gone.add(row.get("replica", -1))

    def commit(self, row: Mapping[str, Any]) -> tuple[float, float]:
        """Take a commit; return its useful seconds of all replicas, and the seconds since the commit before."""
        step = row["step"]
        share, gap = self.steps.add(row)
        self.commits += 1
        if step <= self._highest:
            self._share_again += share
        else:
            self._highest = step
        typical = self.steps.typical
        # Fewer contributors with as many units take longer, unless the usual step is one of fewer contributors.
        present = min(1.0, len(row["contributors"]) / row["total"]) if self.steps.whole_seen else share
        expected = typical * share / present if present else typical
        excess = gap - expected
        if self.commits == 1:
            pass  # its excess is the startup, which `effective` computes once the usual step is known
        elif self._marks or excess > 0.1 * typical:
            self._sample(frozenset(row["contributors"]), excess, self._account(excess, row["t"], row["waits"]))
        elif self.commits % LEARN == 0:
            self._learn(row["waits"])
        if not self._marks and present == 1 and self.commits > 1:
            self.calm_s, self.calm = self.calm_s + gap, self.calm + 1
        self._before, self._gone, self._marks = frozenset(row["contributors"]), set(), {}
        if self.commits > 1:
            self._stepping_s, self._present_s = self._stepping_s + gap, self._present_s + gap * present
        self._deviation_s = row["step_s"] - typical
        self._missing += expected * (1.0 - present)
        return typical * share, gap

    def effective(self, failed: bool = False) -> dict[str, Any]:
        """Return "effective" of the overview; the lost seconds add up to wall_s - useful_s.

        Args:
            failed: an incarnation has failed (`Failures.losses`); without a failure there is no "renewal".
        """
        steps = self.steps
        replay = steps.median * self._share_again
        wall, trained = steps.wall_s, steps.trained_s
        useful = trained - replay
        lost = self._lost | {
            "startup": steps.startup_s,
            "missing": self._missing,
            "replay": replay,
        }
        whole = max(0.0, wall - useful)
        named = sum(lost.values())
        if named > whole:  # some steps were faster than the median: scale the causes down
            missing = min(lost["missing"], whole)
            rest = (whole - missing) / max(named - lost["missing"], 1e-9)
            lost = {cause: seconds * rest for cause, seconds in lost.items()} | {"missing": missing}
        else:
            lost["other"] += whole - named
        badput: dict[str, float] = {}
        for cause, seconds in lost.items():
            if cause != "missing":
                name = ML_GOODPUT.get(cause, "OTHER")
                badput[name] = badput.get(name, 0.0) + seconds
        by_failures = sum(lost[cause] for cause in BY_FAILURES)
        return {
            "wall_clock": min(1.0, trained / max(wall, 1e-9)),
            "renewal": trained / (trained + by_failures) if failed and trained else None,
            "with_replay": min(1.0, useful / max(wall, 1e-9)),
            "wall_s": wall,
            "useful_s": useful,
            "lost_s": lost,
            "badput_s": badput,
            "slice_efficiency": self._present_s / self._stepping_s if self._stepping_s else 1.0,
            "step_deviation_s": self._deviation_s,
        }

    def _learn(self, waits: Mapping[str, float]) -> None:
        for cause in WAITS:
            seconds = waits.get(cause, 0.0)
            old = self._usual.get(cause, seconds)
            self._usual[cause] = old + SMOOTH * (seconds - old)

    def _sample(self, now: frozenset[int], excess: float, parts: dict[str, float]) -> None:
        """Keep what a change of membership cost, for a model of the job."""
        if self._before and self._before <= self._gone:
            self.restarts.append(max(0.0, excess))
        elif self._before - now:
            self.stalls.append(parts)
        elif "granted" in self._marks:
            for cause, seconds in parts.items():
                self.joins[cause] = self.joins.get(cause, 0.0) + seconds

    def _account(self, excess: float, t: float, waits: Mapping[str, float]) -> dict[str, float]:
        """Attribute the extra time of a step to causes, and return what each got.

        First to the phases of a change of membership during the step, then to waits that were longer than usual.
        What remains is "other" (`effective`).
        """
        parts: dict[str, float] = {}
        for cause, seconds in _phases(self._marks, t):
            parts[cause] = min(max(excess, 0.0), seconds)
            excess -= parts[cause]
        for cause in WAITS:
            longer = waits.get(cause, 0.0) - self._usual.get(cause, 0.0)
            put = min(max(excess, 0.0), max(longer, 0.0))
            name = "fetch" if cause == "commit" and "fetching" in self._marks else cause
            parts[name] = parts.get(name, 0.0) + put
            excess -= put
        for cause, put in parts.items():
            self._lost[cause] += put
        return parts | {"other": max(0.0, excess)}


def _phases(marks: Mapping[str, float], t: float) -> list[tuple[str, float]]:
    """Return cause and seconds of each phase before the commit at ``t``, by how sure each is."""
    granted, seen, failed = marks.get("granted"), marks.get("seen"), marks.get("failed")
    found = []
    if seen is not None and granted is not None:
        found.append(("quorum", max(0.0, granted - seen)))
    if failed is not None and seen is not None:
        found.append(("detect", max(0.0, seen - failed)))
    if granted is not None:
        found.append(("reconnect", max(0.0, min(t, marks.get("connected", t)) - granted)))
    return found
