"""`bench recovery`: what a lost rank costs the others, and how soon its replica is back.

- kill, rejoin, stop: SIGKILL or SIGSTOP of random ranks at random moments; then the logs are read. After a SIGSTOP
  the process and its connections stay, but it does nothing more;
- torchft: its Manager in the same situation;
- return: a killed replica's own next commit, from a warm spare, cold, and of torchft; in turns;
- readers, local: see the modules of these names.
"""

from __future__ import annotations

import random
import signal
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TextIO

from ft_hsdp.analysis.goodput import fault_free_step
from ft_hsdp.bench import goals
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.options import kills_of, measures_of, rounds_of, sizes_of
from ft_hsdp.bench.recovery.analysis import (
    PHASES,
    Back,
    Kill,
    Stages,
    back,
    came_back,
    costs,
    exposed,
    failures_of,
    phases,
    repeated,
    span,
    stages_in,
    stalls,
)
from ft_hsdp.bench.recovery.job_under_test import SEED, JobUnderTest, UnderTest, hit_at_random
from ft_hsdp.bench.recovery.local import local
from ft_hsdp.bench.recovery.readers import readers
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.recovery.torchft_under_test import KILLED, STOPPED, TorchftUnderTest, installed, torchft
from ft_hsdp.bench.results import MIB, ProgressLog, ResultRow, milliseconds, ratio, ratio_interval
from ft_hsdp.errors import Retryable

MEASURES = ("kill", "torchft", "rejoin", "return", "stop", "readers", "local")
SAY_EVERY = 10
MOST_STOPS = 50  # each costs a second of silence, and a restart
LONG_KILLS = 10
LONG_S = 0.4  # of waiting in the steps of rejoin, whose cost must not depend on the step
PEER = "torchft"
TURNS = 3  # of each contender; one job runs at a time
SETUPS: Mapping[str, RecoverySetup] = {
    "waiting": RecoverySetup(),
    "2 M parameters": RecoverySetup(replicas=2, transformer=True),
}
MOST: Mapping[str, int] = {"waiting": 12, "2 M parameters": 6}  # kills of each contender


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """What `bench recovery` measures."""

    measures: tuple[str, ...]
    kills: int  # SIGKILLs; torchft, long steps, returns and stops get fewer
    rounds: int  # of what is interleaved
    sizes: tuple[int, ...]  # of a state that is recovered locally, in bytes


def options(args: Namespace) -> RecoveryOptions:
    """Return what `bench recovery` is to do."""
    measures, kills = measures_of(args, MEASURES), kills_of(args, 200)
    return RecoveryOptions(measures, kills, rounds_of(args, 5), sizes_of(args) or (256 * MIB,))


def run(options: RecoveryOptions, stream: TextIO, setup: RecoverySetup | None = None) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Args:
        options: what is measured.
        stream: where progress goes.
        setup: what is trained while replicas are killed.

    Raises:
        ConfigError: The machine does not allow what is asked.
        Retryable: A process fails.
        DataCorruption: A state comes back as another one.
    """
    log, setup = ProgressLog(stream), setup or RecoverySetup()
    result, started = begin_result("recovery", log)
    wanted, count = options.measures, options.kills
    result["kill"] = kills(setup, count, log) if "kill" in wanted else []
    result["torchft"] = torchft(setup, count, log, KILLED, signal.SIGKILL) if "torchft" in wanted else []
    long = replace(setup, wait_s=LONG_S)
    result["rejoin"] = kills(long, min(count, LONG_KILLS), log) if "rejoin" in wanted else []
    result["return"] = returns(count, log) if "return" in wanted else []
    few, stopped = min(count, MOST_STOPS), "stop" in wanted
    result["stop"] = stops(setup, few, log) if stopped else []
    result["torchft_stop"] = torchft(setup, few, log, STOPPED, signal.SIGSTOP) if stopped else []
    result["readers"] = readers(options.rounds, log) if "readers" in wanted else []
    result["local"] = local(options.sizes, options.rounds, log) if "local" in wanted else []
    return finish_result(result, goals.recovery(result), log, started)


def kills(setup: RecoverySetup, count: int, log: ProgressLog) -> list[ResultRow]:
    """SIGKILL random ranks; return a row: survivors' next commit, its phases, the return. Raises Retryable."""
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
    row = kill_row(job.setup, done, job.rows, job.events)
    log.say(f"{len(done)} {what}: next commit less one step, p50 {row['less_one']['p50_ms']:.3g} ms")
    return row


def kill_row(
    setup: RecoverySetup, done: Sequence[Kill], rows: dict[int, list[ResultRow]], events: Sequence[ResultRow]
) -> ResultRow:
    """Return the row for some kills.

    Args:
        setup: what was trained.
        done: the kills.
        rows: the commits that each replica logged.
        events: all events of the run.

    Raises:
        Retryable: A survivor did not log what it did.
    """
    whole = [row for each in rows.values() for row in each if len(row["contributors"]) == setup.replicas]
    step_s = fault_free_step(row for each in rows.values() for row in each)
    failures = failures_of(rows, events)
    waiting_s = sum(map(exposed, whole)) / len(whole)
    found, parts, returns = [], [], []
    for kill, cost in zip(done, stalls(done, rows, step_s), strict=True):
        if cost is None:
            raise Retryable(f"bench: a survivor of replica {kill.replica} did not log its next commit")
        found.append(cost)
        if (failure := failures.get(kill.incarnation)) is not None:
            others = {replica: each for replica, each in rows.items() if replica != kill.replica}
            parts.append(phases(kill, failure, cost.last, rows[cost.last], events))
            returns.append(came_back(kill, failure, others, waiting_s))
    back = [each for each in returns if each is not None]
    split = [each for each in parts if each is not None]
    again = [seconds for each in split if (seconds := repeated(each)) is not None]
    row: ResultRow = {
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "gradient_bytes_per_rank": 4 * setup.layers * setup.elements // setup.ranks,
        "kills": len(done),
        **costs(found, step_s),
        "phases": {name: span([each[name] for each in split]) for name in PHASES} if split else {},
        "rejoin": span([each.rejoin_s for each in back]) if back else None,
    }
    for name, times in {"repeat": again, "rejoin_wait": [each.waited_s for each in back]}.items():
        figures = span(times) if times else None
        row[name] = figures and {**figures, "steps": ratio(figures["p50_ms"], row["step_ms"])}
    return row


@dataclass(frozen=True, slots=True)
class Turn:
    """One job from its start to its end."""

    step_s: float  # fault-free
    backs: tuple[Back, ...]


Contender = Callable[[RecoverySetup, int, random.Random], Turn]
"""Runs a job of a setup and kills so often."""


def returns(most: int, log: ProgressLog, setups: Mapping[str, RecoverySetup] = SETUPS) -> list[ResultRow]:
    """Return a row for each of ``setups``, with at most ``most`` kills of each contender. Raises Retryable."""
    contenders: dict[str, Contender] = {"warm": partial(our_turn, 1), "cold": partial(our_turn, 0)}
    if installed(log):
        contenders[PEER] = torchft_turn
    return [_measure(name, setup, min(most, MOST[name]), contenders, log) for name, setup in setups.items()]


def _measure(
    name: str, setup: RecoverySetup, count: int, contenders: Mapping[str, Contender], log: ProgressLog
) -> ResultRow:
    names = list(contenders)
    turns: dict[str, list[Turn]] = {who: [] for who in names}
    for number in range(min(TURNS, count)):
        share = count // TURNS + (number < count % TURNS)
        first = number % len(names)
        for who in (*names[first:], *names[:first]):
            turn = contenders[who](setup, share, random.Random(SEED + number))
            turns[who].append(turn)
            took = ", ".join(f"{each.less_one_s:.2f}" for each in turn.backs)
            log.say(f"{name}, turn {number + 1}, {who}: back and committed, less one step, after {took} s")
    return return_row(name, setup, turns)


def return_row(name: str, setup: RecoverySetup, turns: Mapping[str, Sequence[Turn]]) -> ResultRow:
    """Return the row of these turns."""
    backs = {who: [each for turn in its for each in turn.backs] for who, its in turns.items()}
    less_one = {who: [each.less_one_s for each in its] for who, its in backs.items()}
    return {
        "model": name,
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "contenders": {who: _figures(turns[who], its) for who, its in backs.items()},
        "times": {
            who: ratio_interval(less_one[who], less_one[PEER]) for who in backs if PEER in backs and who != PEER
        },
    }


def _figures(turns: Sequence[Turn], backs: Sequence[Back]) -> ResultRow:
    return {
        "kills": len(backs),
        "step_ms": milliseconds(sum(turn.step_s for turn in turns) / len(turns)),
        "commit": span([each.commit_s for each in backs]),
        "less_one": span([each.less_one_s for each in backs]),
        "contribute": span([each.contribute_s for each in backs]),
        "phases": {name: span([each.phases[name] for each in backs]) for name in backs[0].phases},
        "starts": Counter(each.how for each in backs if each.how),
    }


def our_turn(spares: int, setup: RecoverySetup, count: int, chance: random.Random) -> Turn:
    """Kill ranks of a job under `up`, with spares for so many replicas."""
    setup = replace(setup, sections={**setup.sections, "spares": spares * setup.ranks})
    with JobUnderTest(setup) as job:

        def then(kill: Kill) -> None:
            job.wait_for_return(kill)
            job.wait_for_spares(spares)

        job.wait_for_spares(spares)
        done = list(hit_at_random(job, count, chance, job.kill, then))
    return _turn(job, done, stages_in(job.events))


def torchft_turn(setup: RecoverySetup, count: int, chance: random.Random) -> Turn:
    """Kill replicas of torchft's loop, tuned; a process that was killed is started afresh at once."""
    with TorchftUnderTest(setup, KILLED["tuned"]) as job:

        def then(kill: Kill) -> None:
            job.start(kill.replica)
            job.wait_for_return(kill)

        done = list(hit_at_random(job, count, chance, lambda n, _: job.hit(n, signal.SIGKILL), then))
    return _turn(job, done, lambda kill, incarnation: ({"imports": job.loaded[kill.replica, incarnation]}, ""))


def _turn(job: UnderTest, done: Sequence[Kill], stages: Stages) -> Turn:
    step_s = job.step_s()
    found = [back(kill, job.rows[kill.replica], stages, step_s) for kill in done]
    backs = tuple(each for each in found if each is not None)
    if len(backs) < len(found):
        raise Retryable("bench: a replica that was killed did not log what it did afterwards")
    return Turn(step_s, backs)
