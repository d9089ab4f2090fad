"""Hosts that are lost at random moments, while replicas shrink and grow: are units trained twice, or skipped?

Each host is away for a random time, so others are lost meanwhile: while a replica waits, while it starts with
fewer ranks, and while it grows. Afterwards the logs are checked, and the run is replayed.
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TextIO

from benchmarks.lone import CALM, SHRINKS, LostHost
from benchmarks.units import GAP, built_in
from benchmarks.whole_job import WholeJob
from ft_hsdp.bench.command import kills_of
from ft_hsdp.bench.jobs import SEED, JobUnderTest
from ft_hsdp.bench.results import ProgressLog, ResultRow, Verdicts, begin_result, finish_result, least, most
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.verify import verify

RANKS, LEFT = 4, 2  # of a replica: at first, and at least
JOBS: Mapping[str, tuple[int, str]] = {  # replicas, `quorum.batch`
    "one, adapt": (1, "adapt"),
    "one, constant": (1, "constant"),
    "two, adapt": (2, "adapt"),
    "two, constant": (2, "constant"),
}
APART_S, AWAY_S = (0.1, 3.0), (0.2, 4.0)  # from one loss to the next; how long a host is away
CALM_SHARE = 0.5  # of the losses come after some steps
STEPS_A_LOSS = 30  # steps of a job for each loss
CHECKPOINT_EVERY = 20  # steps: all copies of a state may be lost at once


def options(args: Namespace) -> int:
    """Return how many hosts `bench losses` loses in each job."""
    return kills_of(args, 50)


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench losses`; a job in which nothing shrank says nothing."""
    for row in result["losses"]:
        wrong = row["twice"] + row["skipped"] + (not row["replayed"]) + len(row["breaches"])
        yield most(f"{row['job']}, {row['losses']} hosts lost: twice, skipped, not replayed", row, 0, wrong)
        yield least(f"{row['job']}: hosts lost, of those asked for", row, row["asked"], row["losses"])
        yield least(f"{row['job']}: times that a replica shrank", row, 1, row["shrunk"])
        yield least(f"{row['job']}: times that a replica grew", row, 1, row["grown"])


def run(count: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("losses", log)
    result["losses"] = losses(count, log)
    return finish_result(result, goals(result), log, started)


class _Hosts:
    """The hosts of a job, and when those that are away come back; each has one rank."""

    def __init__(self, job: JobUnderTest, chance: random.Random) -> None:
        self._job = job
        self._chance = chance
        self._away: list[tuple[float, LostHost]] = []  # until when, on the monotonic clock

    def lose(self) -> bool:
        """Lose the host of a random rank; return whether there was one that runs."""
        replica, rank = self._chance.randrange(self._job.setup.replicas), self._chance.randrange(RANKS)
        try:
            host = LostHost(self._job.run, replica, rank)
        except ConfigError:  # this rank does not run now
            return False
        self._away.append((time.monotonic() + self._chance.uniform(*AWAY_S), host))
        return True

    def back(self, all_of_them: bool = False) -> None:
        """Have hosts back whose time is over, or all of them."""
        now = time.monotonic()
        for until, host in self._away:
            if all_of_them or until <= now:
                host.back()
        self._away = [] if all_of_them else [each for each in self._away if each[0] > now]


def losses(count: int, log: ProgressLog, names: Sequence[str] = tuple(JOBS)) -> list[ResultRow]:
    """Return a row for each name in `JOBS`: random losses, the audit, the replay and the check of the logs.

    If the steps do not last for ``count`` losses, the row says how many there were, and its goal is missed.

    Raises:
        Retryable: A process fails, or the job stands still.
        ConfigError: A run cannot be replayed.
    """
    from ft_hsdp.launch.run.replay import replay  # imports torch

    rows = []
    for name in names:
        replicas, batch = JOBS[name]
        sections: dict[str, Any] = {
            "hosts": {"per_replica": RANKS},
            "memory": {"shrink_to": LEFT},
            "checkpoint": {"every": CHECKPOINT_EVERY},
            **SHRINKS,
        }
        sections["quorum"] = {**SHRINKS["quorum"], "batch": batch}
        setup = built_in(RANKS, replicas, {"steps": STEPS_A_LOSS * count}, sections)
        with WholeJob(setup) as job:
            done = _lose_at_random(job, count, random.Random(SEED))
            summary = job.finish()
            verdict, found = replay(job.run), verify(job.run)
        changes = [event["event"] for event in job.events]
        units = summary["batches"]
        row: ResultRow = {
            "job": name,
            "replicas": replicas,
            "ranks": RANKS,
            "asked": count,
            "losses": done,
            "shrunk": changes.count("Shrunk"),
            "grown": changes.count("Grown"),
            "steps": summary["steps"],
            "narrow_steps": sum(summary.get("narrow_steps", {}).values()),
            "trained": units["trained"],
            "twice": units["duplicated"],
            "skipped": units["skipped"],
            "replayed": verdict.equal,
            "breaches": found.breaches,
        }
        rows.append(row)
        for breach in found.breaches:
            log.note(f"{name}: {breach}")
        same = "bit-identical" if verdict.equal else f"DIFFERENT at step {verdict.differs_at}"
        log.say(
            f"{name}: {done} hosts lost in {row['steps']} steps, {row['twice']} units twice, {row['skipped']} "
            f"skipped; replayed {same}; {len(found.breaches)} breaches"
        )
    return rows


def _lose_at_random(job: JobUnderTest, count: int, chance: random.Random) -> int:
    """Lose random hosts while steps are left, and have them back; return how many were lost.

    The next host is lost after some steps, or at once: while the replica waits, starts, restores or grows.
    """
    hosts = _Hosts(job, chance)

    def newest() -> int:
        return max((rows[-1]["step"] for rows in job.rows.values() if rows), default=0)

    def due(at: float, step: int) -> bool:
        hosts.back()
        return time.monotonic() >= at and newest() >= step and hosts.lose()

    job.wait(lambda: newest() >= CALM, "the first steps")
    for number in range(count):
        at, step = time.monotonic() + chance.uniform(*APART_S), 0
        if chance.random() < CALM_SHARE:
            at, step = 0.0, newest() + chance.randint(1, 2 * GAP - 1)
        if max(step, newest()) > job.setup.sections["train"]["steps"] - GAP:
            count = number
            break
        job.wait(partial(due, at, step), "the next loss")
    hosts.back(all_of_them=True)
    return count
