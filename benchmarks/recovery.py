"""`bench recovery`: what a lost rank costs the others.

- kill, stop: SIGKILL or SIGSTOP of random ranks at random moments; then the logs are read. After a SIGSTOP
  the process and its connections stay, but it does nothing more;
- torchft: its Manager in the same situation, with `stop` also after a SIGSTOP.
"""

from __future__ import annotations

import math
import random
import signal
import statistics
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from benchmarks.command import kills_of, measures_of
from benchmarks.jobs import (
    SEED,
    JobUnderTest,
    Kill,
    Setting,
    Setup,
    TorchftUnderTest,
    UnderTest,
    gone,
    hit_at_random,
)
from benchmarks.results import (
    ProgressLog,
    ResultRow,
    Row,
    Verdicts,
    begin_result,
    finish_result,
    milliseconds,
    most,
    version,
)
from ft_hsdp.errors import Retryable

MEASURES = ("kill", "torchft", "stop")
SAY_EVERY = 10
MOST_STOPS = 50  # each costs a second of silence, and a restart

NEXT_COMMIT = {"less_one": "SIGKILL to next commit - 1 step", "stall": "all of the step hit - 1 step"}
NEXT_MS, STOP_MS = (100.0, 300.0), (1200.0, 2000.0)  # the goals: p50 and p99

TUNED = (1000, 100)
SETTINGS: Mapping[signal.Signals, Mapping[str, Setting]] = {
    signal.SIGKILL: {
        "defaults": Setting((), "heartbeat_timeout 5 s, join_timeout 60 s", 3),
        "tuned": Setting(TUNED, "heartbeat_timeout 1 s, join_timeout 0.1 s", 10),
    },
    signal.SIGSTOP: {
        "defaults": Setting((), "timeout 60 s, heartbeat_timeout 5 s, join_timeout 60 s", 2),
        "tuned": Setting(TUNED, "timeout 2 s, heartbeat_timeout 1 s, join_timeout 0.1 s", 10, 2.0),
    },
}


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """What `bench recovery` measures."""

    measures: tuple[str, ...]
    kills: int  # SIGKILLs; torchft and stops get fewer


def options(args: Namespace) -> RecoveryOptions:
    """Return what `bench recovery` is to do."""
    return RecoveryOptions(measures_of(args, MEASURES), kills_of(args, 200))


def goals(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench recovery`."""
    for row in result["kill"]:
        for key, text in NEXT_COMMIT.items():
            yield from _quantiles(text, row, row[key], NEXT_MS)
    for row in result["stop"]:
        yield from _quantiles("SIGSTOP to next commit - 1 step", row, row["less_one"], STOP_MS)


def _quantiles(text: str, row: Row, span: Mapping[str, float], limits: tuple[float, float]) -> Verdicts:
    for name, limit in zip(("p50", "p99"), limits, strict=True):
        yield most(f"{text}, {name} ms", row, limit, span[f"{name}_ms"])


def run(options: RecoveryOptions, stream: TextIO, setup: Setup | None = None) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Args:
        options: what is measured.
        stream: where progress goes.
        setup: what is trained while replicas are killed.

    Raises:
        Retryable: A process fails.
    """
    log, setup = ProgressLog(stream), setup or Setup()
    result, started = begin_result("recovery", log)
    result |= {name: [] for name in MEASURES}
    if "kill" in options.measures:
        result["kill"] = kills(setup, options.kills, log)
    if "torchft" in options.measures:
        result["torchft"] = torchft(setup, options.kills, log, signal.SIGKILL)
    if "stop" in options.measures:
        few = min(options.kills, MOST_STOPS)
        result["stop"] = kills(setup, few, log, signal.SIGSTOP)
        result["torchft"] += torchft(setup, few, log, signal.SIGSTOP)
    return finish_result(result, goals(result), log, started)


def kills(setup: Setup, count: int, log: ProgressLog, number: signal.Signals = signal.SIGKILL) -> list[ResultRow]:
    """Send random ranks a signal; return a row: the survivors' next commit. Raises Retryable."""
    with JobUnderTest(setup) as job:

        def then(kill: Kill) -> None:
            job.wait_for_survivors(kill)
            if number == signal.SIGSTOP:
                job.kill(kill.replica, kill.rank)  # a new one takes its place without waiting for its eviction

        found = _costs(job, count, log, partial(job.kill, name=number.name.removeprefix("SIG")), then)
    size = 4 * setup.layers * setup.elements // setup.ranks
    log.say(f"{count} x {number.name}: next commit less one step, p50 {found['less_one']['p50_ms']:.3g} ms")
    return [{"replicas": setup.replicas, "ranks": setup.ranks, "gradient_bytes_per_rank": size, **found}]


def torchft(
    setup: Setup,
    most: int,
    log: ProgressLog,
    number: signal.Signals,
    settings: Mapping[signal.Signals, Mapping[str, Setting]] = SETTINGS,
) -> list[ResultRow]:
    """Return a row for each of its settings, with at most ``most`` signals; none where it is not installed."""
    rows: list[ResultRow] = []
    for name, setting in settings[number].items() if installed(log) else ():
        with TorchftUnderTest(setup, setting) as job:

            def then(kill: Kill, job: TorchftUnderTest = job) -> None:
                job.wait_for_survivors(kill)
                job.start(kill.replica)

            def hit(n: int, _: int, job: TorchftUnderTest = job) -> Kill:
                return job.hit(n, number)

            found = _costs(job, min(most, setting.kills), log, hit, then)
        head = {"setting": name, "signal": number.name, "text": setting.text}
        rows.append({**head, "replicas": setup.replicas, **found})
        p50_ms = found["less_one"]["p50_ms"]
        log.say(f"torchft, {name}, {number.name}: next commit less one step, p50 {p50_ms:.4g} ms")
    return rows


def installed(log: ProgressLog) -> bool:
    """Return whether torchft is installed; note if it is not."""
    if version("torchft") is None:
        log.note("torchft is left out: not installed")
        return False
    return True


def _costs(
    job: UnderTest,
    count: int,
    log: ProgressLog,
    hit: Callable[[int, int], Kill],
    then: Callable[[Kill], None],
) -> ResultRow:
    done: list[Kill] = []
    for kill in hit_at_random(job, count, random.Random(SEED), hit, then):
        done.append(kill)
        if len(done) % SAY_EVERY == 0:
            log.say(f"{len(done)} of {count} signals")
    step_s = job.step_s()
    return costs(stalls(done, job.rows, step_s), step_s)


@dataclass(frozen=True, slots=True)
class Stall:
    """What a kill cost the survivors."""

    next_s: float  # from the kill to the last survivor's first commit without the victim
    less_one_s: float  # the same less one fault-free step
    stall_s: float  # from the commit before the kill to that commit, less as many fault-free steps


def stall(kill: Kill, rows: Mapping[int, Sequence[Row]], step_s: float) -> Stall | None:
    """Return what ``kill`` cost the survivors; None where one of them logged too little.

    Args:
        kill: the kill.
        rows: the commits that each survivor logged.
        step_s: a fault-free step.
    """
    ends: list[Stall] = []
    for mine in rows.values():
        before = [row for row in mine if row["t"] <= kill.t]
        after = next((row for row in mine if row["t"] > kill.t and gone(row, kill)), None)
        if not before or after is None:
            return None
        next_s, steps = after["t"] - kill.t, after["step"] - before[-1]["step"]
        ends.append(Stall(next_s, next_s - step_s, after["t"] - before[-1]["t"] - steps * step_s))
    return max(ends, key=lambda each: each.next_s, default=None)


def stalls(kills: Sequence[Kill], rows: Mapping[int, Sequence[Row]], step_s: float) -> list[Stall]:
    """Return what each kill cost the survivors; ``rows``: the commits that each replica logged.

    Raises:
        Retryable: A survivor logged too little.
    """
    found = []
    for kill in kills:
        others = {replica: each for replica, each in rows.items() if replica != kill.replica}
        if (cost := stall(kill, others, step_s)) is None:
            raise Retryable(f"bench: a survivor of replica {kill.replica} did not log its next commit")
        found.append(cost)
    return found


def costs(found: Sequence[Stall], step_s: float) -> ResultRow:
    """Return the figures of some stalls."""
    return {
        "kills": len(found),
        "step_ms": milliseconds(step_s),
        "next": span([each.next_s for each in found]),
        "less_one": span([each.less_one_s for each in found]),
        "stall": span([each.stall_s for each in found]),
    }


def span(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and greatest in milliseconds, and how many there were."""
    return {
        "p50_ms": milliseconds(statistics.median(seconds)),
        "p99_ms": milliseconds(quantile(seconds, 0.99)),
        "max_ms": milliseconds(max(seconds)),
        "count": len(seconds),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
