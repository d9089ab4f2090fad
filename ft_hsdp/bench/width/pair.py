"""Two replicas, of which one loses a host and gets it back: units per second, and what the other one waits for.

Steps wait instead of computing, so a step of fewer ranks takes as long as one of all. Each rank is a host.

- rate: units per second while one replica has 3 of 4 ranks, by the share of the ranks that are there, beside the
  rate with all ranks before and after it;
- shrink: what the other replica waited for between the check-in of the fewer ranks and their first contribution,
  and the same for all ranks when the host is back; and the steps that were repeated to grow.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ft_hsdp.analysis.incarnations import incarnations
from ft_hsdp.bench.recovery.analysis import exposed
from ft_hsdp.bench.recovery.job_under_test import SEED, JobUnderTest
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.results import ProgressLog, ResultRow, milliseconds, ratio, spread
from ft_hsdp.bench.width.lone import CALM, SHRINKS, LostHost
from ft_hsdp.launch.run.directory import Row

STEP_S = 0.5  # as in `bench memory`: 8 ranks share the cores, and what they compute is not to count
REPLICAS, RANKS, LEFT = 2, 4, 3
VICTIM, OTHER = 1, 0
RATE_STEPS = 60  # of each window


@dataclass(frozen=True, slots=True)
class WidthChange:
    """A replica came back with another number of ranks."""

    t: float  # Unix time of what caused it: the host was lost, or was back
    incarnation: str  # that came back
    width: int  # its ranks


def setup_of() -> RecoverySetup:
    """Return the job of both measures."""
    sections = {"hosts": {"per_replica": RANKS}, "memory": {"shrink_to": LEFT}, **SHRINKS}
    return RecoverySetup(replicas=REPLICAS, ranks=RANKS, wait_s=STEP_S, sections=sections)


def ranks_of(row: Row, replica: int = VICTIM) -> int:
    """Return how many ranks of a replica contributed to a commit."""
    width = next((each["width"] for each in row["contributions"] if each["replica"] == replica), None)
    return 0 if width is None else int(width) or RANKS


class _Pair:
    """The job, and what was done to it."""

    def __init__(self, job: JobUnderTest) -> None:
        self.job = job
        self.rows = job.rows[OTHER]
        self.changes: list[WidthChange] = []

    def until(self, ranks: int, steps: int) -> None:
        """Wait until the victim has contributed to the newest ``steps`` commits with so many ranks."""
        self.job.wait(
            lambda: len(self.rows) >= steps and all(ranks_of(row) == ranks for row in self.rows[-steps:]),
            f"{steps} steps with {ranks} ranks",
        )

    def lose(self, rank: int) -> LostHost:
        """Lose the host of a rank, and wait for the fewer ranks."""
        host = LostHost(self.job.run, VICTIM, rank)
        self._came(host.t, LEFT)
        return host

    def back(self, host: LostHost) -> None:
        """Have the host back, and wait for all ranks."""
        now = time.time()
        host.back()
        self._came(now, RANKS)

    def _came(self, t: float, ranks: int) -> None:
        self.until(ranks, CALM)
        self.changes.append(WidthChange(t, str(self.job.rows[VICTIM][-1]["incarnation"]), ranks))


def rate(log: ProgressLog) -> list[ResultRow]:
    """Return a row: units per second with fewer ranks, and with all of them before and after. Raises Retryable."""
    windows = {"before": RANKS, "fewer": LEFT, "after": RANKS}
    found: dict[str, float] = {}
    with JobUnderTest(setup_of()) as job:
        pair = _Pair(job)
        for name, ranks in windows.items():
            if name == "fewer":
                host = pair.lose(RANKS - 1)
            elif name == "after":
                pair.back(host)
            pair.until(ranks, CALM + RATE_STEPS)
            found[name] = units_per_s(pair.rows[-RATE_STEPS - 1 :])
            log.say(f"rate, {ranks} of {RANKS} ranks in one of {REPLICAS} replicas: {found[name]:.2f} units/s")
    share = (RANKS * (REPLICAS - 1) + LEFT) / (RANKS * REPLICAS)
    whole = statistics.fmean((found["before"], found["after"]))
    return [
        {
            "replicas": REPLICAS,
            "ranks": RANKS,
            "left": LEFT,
            "steps": RATE_STEPS,
            "units_per_s": {name: round(each, 3) for name, each in found.items()},
            "share": share,
            "of_share": ratio(found["fewer"], share * whole),
        }
    ]


def units_per_s(rows: Sequence[Row]) -> float:
    """Return the units of all commits but the first, by the time since the first."""
    return float(sum(row["units"] for row in rows[1:]) / (rows[-1]["t"] - rows[0]["t"]))


def shrink(count: int, log: ProgressLog) -> list[ResultRow]:
    """Return a row: one of two replicas loses a host ``count`` times, and gets it back. Raises Retryable."""
    chance = random.Random(SEED)
    with JobUnderTest(setup_of()) as job:
        pair = _Pair(job)
        pair.until(RANKS, 2 * CALM)
        for number in range(count):
            pair.until(RANKS, CALM + chance.randrange(CALM))
            time.sleep(chance.uniform(0, STEP_S))
            host = pair.lose(chance.randrange(RANKS))
            pair.back(host)
            log.say(f"shrink: {number + 1} of {count}")
        step_s = job.step_s()
        usual_s = statistics.median(exposed(row) for row in pair.rows if ranks_of(row) == RANKS)
    waits: dict[int, list[float]] = {LEFT: [], RANKS: []}
    repeated = 0
    for change in pair.changes:
        waits[change.width].append(waited_s(change, pair.rows, job.events, usual_s))
        if change.width == RANKS:
            repeated += retried(change, pair.rows, job.events)
    return [
        {
            "replicas": REPLICAS,
            "ranks": RANKS,
            "left": LEFT,
            "losses": count,
            "step_ms": milliseconds(step_s),
            "waits": {"shrink": spread(waits[LEFT]), "grow": spread(waits[RANKS])},
            "steps": {
                "shrink": ratio(statistics.median(waits[LEFT]), step_s),
                "grow": ratio(statistics.median(waits[RANKS]), step_s),
            },
            "repeated": repeated,
        }
    ]


def waited_s(change: WidthChange, rows: Sequence[Row], events: Sequence[Row], usual_s: float) -> float:
    """Return what the other replica waited for a change, beyond the waits of as many usual steps.

    It counts the steps from the check-in of the new incarnation to its first contribution; for a growth, those
    from the return of the host to the first one without the replica, too.

    Args:
        change: The change.
        rows: The commits of the other replica.
        events: All events of the job.
        usual_s: What it waits for in a usual step.
    """
    after = [row for row in rows if row["t"] > change.t]
    joined = next(n for n, row in enumerate(after) if _is_of(change, row, events))
    since = _checked_in(change, events)
    counted = [row for row in after[: joined + 1] if row["t"] > since]
    if change.width == RANKS:
        gone = next(n for n, row in enumerate(after) if not ranks_of(row))
        counted += after[: gone + 1]
    return float(sum(map(exposed, counted)) - len(counted) * usual_s)


def retried(change: WidthChange, rows: Sequence[Row], events: Sequence[Row]) -> int:
    """Return how many steps the other replica repeated from a change's cause to the next contribution."""
    first = next(row["t"] for row in rows if row["t"] > change.t and _is_of(change, row, events))
    repeats = (e for e in events if e["event"] in ("StepRetried", "HeadRolledBack"))
    return sum(change.t < each["t"] <= first for each in repeats)


def _checked_in(change: WidthChange, events: Sequence[Row]) -> float:
    since = incarnations(events)[VICTIM, change.incarnation].checked_in
    return math.inf if since is None else since


def _is_of(change: WidthChange, row: Row, events: Sequence[Row]) -> bool:
    """Return whether the changed replica contributed to a commit after its check-in."""
    return ranks_of(row) == change.width and row["t"] > _checked_in(change, events)
