"""A killed replica's own next commit: from a warm spare, cold, and of torchft's Manager; in turns, in one run."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ft_hsdp.bench.recovery.analysis import Back, Kill, Stages, back, span, stages_in
from ft_hsdp.bench.recovery.job_under_test import SEED, JobUnderTest, UnderTest, hit_at_random
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.recovery.torchft_under_test import KILLED, TorchftUnderTest, installed
from ft_hsdp.bench.results import ProgressLog, ResultRow, milliseconds, ratio_interval
from ft_hsdp.errors import Retryable

PEER = "torchft"
TURNS = 3  # of each contender; one job runs at a time
SETUPS: Mapping[str, RecoverySetup] = {
    "waiting": RecoverySetup(),
    "2 M parameters": RecoverySetup(replicas=2, transformer=True),
}
MOST: Mapping[str, int] = {"waiting": 12, "2 M parameters": 6}  # kills of each contender


@dataclass(frozen=True, slots=True)
class Turn:
    """One job from its start to its end."""

    step_s: float  # fault-free
    backs: tuple[Back, ...]


Contender = Callable[[RecoverySetup, int, random.Random], Turn]
"""Runs a job of a setup and kills so often."""


def returns(most: int, log: ProgressLog, setups: Mapping[str, RecoverySetup] = SETUPS) -> list[ResultRow]:
    """Return a row for each of ``setups``, with at most ``most`` kills of each contender. Raises Retryable."""
    contenders: dict[str, Contender] = {"warm": partial(ours, 1), "cold": partial(ours, 0)}
    if installed(log):
        contenders[PEER] = torchft
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
    return result(name, setup, turns)


def result(name: str, setup: RecoverySetup, turns: Mapping[str, Sequence[Turn]]) -> ResultRow:
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


def ours(spares: int, setup: RecoverySetup, count: int, chance: random.Random) -> Turn:
    """Kill ranks of a job under `up`, with spares for so many replicas."""
    setup = replace(setup, sections={**setup.sections, "spares": spares * setup.ranks})
    with JobUnderTest(setup) as job:

        def then(kill: Kill) -> None:
            job.wait_for_return(kill)
            job.wait_for_spares(spares)

        job.wait_for_spares(spares)
        done = list(hit_at_random(job, count, chance, job.kill, then))
    return _turn(job, done, stages_in(job.events))


def torchft(setup: RecoverySetup, count: int, chance: random.Random) -> Turn:
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
