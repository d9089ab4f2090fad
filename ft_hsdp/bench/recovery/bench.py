"""`bench recovery`: what a lost rank costs the others.

- kill, stop: SIGKILL or SIGSTOP of random ranks at random moments; then the logs are read. After a SIGSTOP
  the process and its connections stay, but it does nothing more;
- torchft: its Manager in the same situation, with `stop` also after a SIGSTOP.
"""

from __future__ import annotations

import random
import signal
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ft_hsdp.analysis.goodput import fault_free_step
from ft_hsdp.bench import goals
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.options import kills_of, measures_of
from ft_hsdp.bench.recovery.analysis import Kill, costs, stalls
from ft_hsdp.bench.recovery.job_under_test import SEED, JobUnderTest, hit_at_random
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.recovery.torchft_under_test import KILLED, STOPPED, torchft
from ft_hsdp.bench.results import ProgressLog, ResultRow
from ft_hsdp.errors import Retryable

MEASURES = ("kill", "torchft", "stop")
SAY_EVERY = 10
MOST_STOPS = 50  # each costs a second of silence, and a restart


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """What `bench recovery` measures."""

    measures: tuple[str, ...]
    kills: int  # SIGKILLs; torchft and stops get fewer


def options(args: Namespace) -> RecoveryOptions:
    """Return what `bench recovery` is to do."""
    return RecoveryOptions(measures_of(args, MEASURES), kills_of(args, 200))


def run(options: RecoveryOptions, stream: TextIO, setup: RecoverySetup | None = None) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Args:
        options: what is measured.
        stream: where progress goes.
        setup: what is trained while replicas are killed.

    Raises:
        Retryable: A process fails.
    """
    log, setup = ProgressLog(stream), setup or RecoverySetup()
    result, started = begin_result("recovery", log)
    wanted, count = options.measures, options.kills
    result["kill"] = kills(setup, count, log) if "kill" in wanted else []
    result["torchft"] = torchft(setup, count, log, KILLED, signal.SIGKILL) if "torchft" in wanted else []
    if "stop" in wanted:
        few = min(count, MOST_STOPS)
        result["stop"] = stops(setup, few, log)
        result["torchft"] += torchft(setup, few, log, STOPPED, signal.SIGSTOP)
    return finish_result(result, goals.recovery(result), log, started)


def kills(setup: RecoverySetup, count: int, log: ProgressLog) -> list[ResultRow]:
    """SIGKILL random ranks; return a row: survivors' next commit. Raises Retryable."""
    with JobUnderTest(setup) as job:
        done = _hit(job, count, log, job.kill, job.wait_for_survivors)
    return [_row(job, done, "kills", log)]


def stops(setup: RecoverySetup, count: int, log: ProgressLog) -> list[ResultRow]:
    """SIGSTOP random ranks; return a row as for kills. Raises Retryable."""
    with JobUnderTest(setup) as job:

        def then(kill: Kill) -> None:
            job.wait_for_survivors(kill)
            job.kill(kill.replica, kill.rank)  # so that a new one takes its place without waiting for its eviction

        done = _hit(job, count, log, job.stop, then)
    return [_row(job, done, "stops", log)]


def _hit(
    job: JobUnderTest,
    count: int,
    log: ProgressLog,
    hit: Callable[[int, int], Kill],
    then: Callable[[Kill], None],
) -> list[Kill]:
    done: list[Kill] = []
    for kill in hit_at_random(job, count, random.Random(SEED), hit, then):
        done.append(kill)
        if len(done) % SAY_EVERY == 0:
            log.say(f"{len(done)} of {count} signals")
    return done


def _row(job: JobUnderTest, done: Sequence[Kill], what: str, log: ProgressLog) -> ResultRow:
    row = kill_row(job.setup, done, job.rows)
    log.say(f"{len(done)} {what}: next commit less one step, p50 {row['less_one']['p50_ms']:.3g} ms")
    return row


def kill_row(setup: RecoverySetup, done: Sequence[Kill], rows: dict[int, list[ResultRow]]) -> ResultRow:
    """Return the row for some kills; ``rows``: the commits that each replica logged. Raises Retryable."""
    step_s = fault_free_step(row for each in rows.values() for row in each)
    found = stalls(done, rows, step_s)
    if None in found:
        raise Retryable("bench: a survivor did not log its next commit")
    return {
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "gradient_bytes_per_rank": 4 * setup.layers * setup.elements // setup.ranks,
        "kills": len(done),
        **costs([each for each in found if each is not None], step_s),
    }
