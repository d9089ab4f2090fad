"""summary.json, the figures of a run, and `explain`, a run in words, from rows that its processes logged. Pure.

Memory grows with the number of failures and recoveries, and not with the length of the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ft_hsdp.analysis.failures import Failures
from ft_hsdp.analysis.goodput import StepTimes
from ft_hsdp.analysis.incarnations import PARTS, IncarnationStart, starts
from ft_hsdp.config import Config
from ft_hsdp.event_table import fault, tell
from ft_hsdp.launch.run.audit import UnitAudit
from ft_hsdp.launch.run.directory import Row

# What a recovery says of itself: which incarnation took which state over, from where, and what that cost.
RECOVERY = ("replica", "number", "state", "rung", "ranks", "hosts", "from", "bytes", "seconds", "lost_steps")
BLOCKS = 2048  # most sums of losses in memory; up to so many steps the means of tenths are exact

Summary = dict[str, Any]


class RunTally:
    """Folds a run into its summary.

    It takes canonical commits by step, events in about the order of their times, and the lines of fed.jsonl.
    """

    def __init__(self, config: Config) -> None:
        self._replicas = config.replicas
        self.audit = UnitAudit(config.data_ranks if config.memory.shrink_to is None else 1)
        self._failures = Failures(config.slots, most=None)
        self._events = 0
        self._starts: Counter[int] = Counter()  # by supervisors
        self._boots: Counter[int] = Counter()  # incarnations that began to work: all that is known under torchrun
        self._recoveries: list[Row] = []
        self._doubted: set[str] = set()  # tensors, or values, in which replicas may differ
        self._unplaced: dict[int, bool] = {}  # whether a replica's newest event is that it has no place
        self._counted_to = -1  # failures of commits up to this epoch were counted before a rewind
        self._begin()

    def _begin(self) -> None:
        self._losses = TenthMeans()
        self._steps = StepTimes()
        self._tokens = 0
        self._stalls: Counter[str] = Counter()
        self._narrow: dict[int, int] = {}  # data ranks of a contributor -> steps; only of those that had too few
        self._last: Row | None = None
        self._contributed: dict[int, int] = {}  # replica -> its last step

    def again(self) -> None:
        """Begin again with the first commit, because the job undid some of the steps.

        Events stay, and so do the times of failures that came from commits: those steps did happen.
        """
        self._counted_to = max(self._counted_to, self._last["epoch"] if self._last else -1)
        self.audit.again()
        self._begin()

    def commit(self, row: Row) -> None:
        """Add the next canonical commit."""
        self.audit.commit(row)
        if row["epoch"] > self._counted_to:
            self._failures.commit(row["t"], row["epoch"], row["contributors"])
        self._steps.add(row)
        self._tokens += row["tokens"]
        self._stalls.update(row["waits"])
        self._losses.add(row["loss"])
        for width in {c["width"] for c in row["contributions"] if c.get("width")}:
            self._narrow[width] = self._narrow.get(width, 0) + 1
        self._last = row
        self._contributed.update(dict.fromkeys(row["contributors"], row["step"]))

    def fed(self, replica: int, line: Row) -> None:
        """Add the next line of a replica's fed.jsonl; lines of another form are skipped."""
        if line.keys() >= {"step", "shard", "index", "units", "incarnation"}:
            self.audit.fed(replica, line)

    def event(self, event: Row) -> None:
        name, replica = event["event"], event.get("replica")
        self.audit.event(event)
        self._events += 1
        self._failures.event(self._events, name, event)
        if not isinstance(replica, int):
            return
        if name == "JobDoubted":
            self._doubted.add(str(event.get("tensor")))
        if name == "StateRestored":
            width = {"width": event["width"]} if "width" in event else {}  # only if it was another than its own
            self._recoveries.append({key: event.get(key) for key in RECOVERY} | width)
        if name == "ReplicaStarted":
            self._starts[replica] += 1
        if name == "ReplicaBooted":
            self._boots[replica] += 1
        if name in ("ReplicaUnplaced", "ReplicaStarted"):
            self._unplaced[replica] = name == "ReplicaUnplaced"

    def summary(self, finals: Mapping[int, Row], lost: Iterable[int] = ()) -> Summary:
        """Return the summary of the run so far."""
        wall, typical = self._steps.wall_s, self._steps.median
        end = self._last["t"] if self._last else None
        failures = [self._failures.account(f, typical) for f in self._failures.losses()]
        for failure in failures:
            failure["back"] = failure["rejoin_s"] is not None
            if failure["rejoin_s"] is None:  # it did not contribute again: the time to the end of the run
                failure["rejoin_s"] = max(0.0, (failure["t"] if end is None else end) - failure["t"])
        summary: Summary = {
            "steps": self._last["step"] if self._last else 0,
            "loss_first": self._losses.of_first(),
            "loss_last": self._losses.of_last(),
            "wall_s": wall,
            "tokens": self._tokens,
            "effective_training_ratio": self._steps.trained_s / wall if wall > 0 else 0.0,
            "stall_s": {cause: float(seconds) for cause, seconds in sorted(self._stalls.items())},
            "replicas": {
                str(r): self._replica(r, finals.get(r))
                for r in sorted({*range(self._replicas), *self._starts, *self._boots})
            },
            "batches": self.audit.result(),
            "failures": failures,
            "recoveries": list(self._recoveries),
        }
        if self._narrow:
            summary["narrow_steps"] = {str(ranks): steps for ranks, steps in sorted(self._narrow.items())}
        if self._doubted:
            summary["doubted"] = sorted(self._doubted)
        if lost := sorted(lost):
            summary["lost"] = lost
        if unplaced := sorted(replica for replica, yes in self._unplaced.items() if yes):
            summary["unplaced"] = unplaced
        return summary

    def _replica(self, replica: int, final: Row | None) -> Row:
        """Return how a replica ended; without its final state, the last step to which it contributed."""
        end = final or {"step": self._contributed.get(replica, 0), "lineage": "", "digest": ""}
        incarnations = max(self._starts[replica], self._boots[replica])
        return {**{key: end[key] for key in ("step", "lineage", "digest")}, "incarnations": incarnations}


class TenthMeans:
    """Means over the first and the last tenth of a series of values, from sums of blocks.

    The means are exact up to `BLOCKS` values. Beyond that, a block at the border of a tenth counts in part, with
    its mean. A value that is not finite counts as a step, but not in the mean: a skipped step may have no loss.
    """

    def __init__(self) -> None:
        self._size = 1  # values in a block
        self._blocks: list[tuple[float, int, int]] = []  # sum and number of finite values, and number of values

    def add(self, value: float | None) -> None:
        """Add the value of the next step; None if the step has none."""
        finite = value is not None and math.isfinite(value)
        one = (float(value or 0.0), 1, 1) if finite else (0.0, 0, 1)
        if self._blocks and self._blocks[-1][2] < self._size:
            self._blocks[-1] = _joined(self._blocks[-1], one)
            return
        self._blocks.append(one)
        if len(self._blocks) > BLOCKS:
            pairs = [self._blocks[n : n + 2] for n in range(0, len(self._blocks), 2)]
            self._blocks = [_joined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
            self._size *= 2

    def of_first(self) -> float:
        """Return the mean of the first tenth, of at least one value; 0.0 without values."""
        return self._mean(self._blocks)

    def of_last(self) -> float:
        """Return the mean of the last tenth, of at least one value; 0.0 without values."""
        return self._mean(self._blocks[::-1])

    def _mean(self, blocks: Sequence[tuple[float, int, int]]) -> float:
        left = max(1, sum(values for _, _, values in blocks) // 10)
        total = weight = 0.0
        for of, finite, values in blocks:
            share = min(1.0, left / values)
            total, weight, left = total + of * share, weight + finite * share, left - values
            if left <= 0:
                break
        return total / weight if weight else 0.0


def _joined(a: tuple[float, int, int], b: tuple[float, int, int]) -> tuple[float, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def start_table(found: Sequence[IncarnationStart]) -> list[str]:
    """Return the times of starts as lines: a heading, and a line for each start."""
    names = ("down", *PARTS, "in all")
    widths = [max(len(name), 6) for name in names]
    wide = max(7, *(len(start.incarnation) for start in found))
    lines = [f"{'seconds of each start':{wide + 14}}  " + "  ".join(map(str.rjust, names, widths)).rstrip()]
    for start in found:
        values = [start.down, *(start.parts.get(name) for name in PARTS), start.back]
        cells = ["-" if value is None else f"{value:.2f}" for value in values]
        named = f"{start.incarnation:{wide}}  {start.how[:12]:12}"
        lines.append(f"{named}  " + "  ".join(map(str.rjust, cells, widths)))
    return lines


def explain(events: Iterable[Row], failures: Sequence[Row] = (), lost: Sequence[int] = ()) -> list[str]:
    """Return a run as lines: each event with its reason, the times of each start, a paragraph for each failure."""
    ordered = sorted(events, key=lambda e: e["t"])
    if not ordered:
        return ["nothing is recorded"]
    start = ordered[0]["t"]
    lines = [f"{e['t'] - start:9.3f} s  {tell(e)}" for e in ordered]
    started = starts(ordered, failures)
    if started:
        lines += ["", *start_table(started)]
    for n, failure in enumerate(failures, 1):
        lines += ["", f"failure {n}: {failure_in_words(failure, start)}"]
    lines += [f"replica {replica} was lost: {_why_lost(ordered, replica)}" for replica in lost]
    return lines


def _why_lost(ordered: Sequence[Row], replica: int) -> str:
    """Return why a replica was given up: by its supervisor, or with the job."""
    whys = {e["event"]: e["reason"] for e in ordered if e.get("replica") == replica or e["event"] == "JobGivenUp"}
    return str(whys.get("ReplicaLost") or whys.get("JobGivenUp") or "its restarts were used up")


def failure_in_words(failure: Row, start: float) -> str:
    """Return a failure of summary.json as a sentence; ``start`` is the time of the run's first event."""
    back = failure["rejoin_s"] if failure.get("back", True) else None
    came = f"was back after {back:.2f} s" if back is not None else "did not come back"
    seen = failure["detect_s"]
    noticed = f"seen after {seen * 1e3:.0f} ms" if seen is not None else "seen after an unknown time"
    donor = f", with the state of replica {failure['source']}" if failure["source"] else ""
    rank = f" rank {failure['rank']}" if failure["rank"] is not None else ""
    return (
        f"replica {failure['replica']}{rank} {fault(failure['kind'])} at {failure['t'] - start:.3f} s; "
        f"{noticed}; the others lost {failure['stall_s']:.2f} s; "
        f"it {came}{donor}"
    )
