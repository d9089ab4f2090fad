"""A killed replica's own next commit: from a warm spare, cold, and of torchft's Manager; in turns, in one run."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ft_hsdp.bench.options import ProgressLog, ResultRow
from ft_hsdp.bench.recovery.analysis import Back, Kill, Stages, back, span, stages_in
from ft_hsdp.bench.recovery.job_under_test import SEED, JobUnderTest, UnderTest, hunt
from ft_hsdp.bench.recovery.scene import RecoveryScene
from ft_hsdp.bench.recovery.torchft_under_test import KILLED, TorchftUnderTest, installed
from ft_hsdp.bench.results import milliseconds, ratio_interval
from ft_hsdp.errors import Retryable

PEER = "torchft"
TURNS = 3  # of each contender; one job runs at a time
SCENES: Mapping[str, RecoveryScene] = {
    "waiting": RecoveryScene(),
    "2 M parameters": RecoveryScene(replicas=2, transformer=True),
}
MOST: Mapping[str, int] = {"waiting": 12, "2 M parameters": 6}  # kills of each contender


@dataclass(frozen=True, slots=True)
class Turn:
    """One job from its start to its end: seconds of a fault-free step, and each return."""

    step_s: float
    backs: tuple[Back, ...]


Contender = Callable[[RecoveryScene, int, random.Random], Turn]
"""Runs a job of the scene and kills so often."""


def returns(most: int, log: ProgressLog, scenes: Mapping[str, RecoveryScene] = SCENES) -> list[ResultRow]:
    """A row for each of `scenes`, with at most `most` kills of each contender. Raises Retryable."""
    contenders: dict[str, Contender] = {"warm": partial(ours, 1), "cold": partial(ours, 0)}
    if installed(log):
        contenders[PEER] = torchft
    return [_measure(name, scene, min(most, MOST[name]), contenders, log) for name, scene in scenes.items()]


def _measure(
    name: str, scene: RecoveryScene, count: int, contenders: Mapping[str, Contender], log: ProgressLog
) -> ResultRow:
    names = list(contenders)
    turns: dict[str, list[Turn]] = {who: [] for who in names}
    for number in range(min(TURNS, count)):
        share = count // TURNS + (number < count % TURNS)
        first = number % len(names)
        for who in (*names[first:], *names[:first]):
            turn = contenders[who](scene, share, random.Random(SEED + number))
            turns[who].append(turn)
            took = ", ".join(f"{each.less_one_s:.2f}" for each in turn.backs)
            log.say(f"{name}, turn {number + 1}, {who}: back and committed, less one step, after {took} s")
    return result(name, scene, turns)


def result(name: str, scene: RecoveryScene, turns: Mapping[str, Sequence[Turn]]) -> ResultRow:
    """The row of these turns."""
    backs = {who: [each for turn in its for each in turn.backs] for who, its in turns.items()}
    less_one = {who: [each.less_one_s for each in its] for who, its in backs.items()}
    return {
        "model": name,
        "replicas": scene.replicas,
        "ranks": scene.ranks,
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


def ours(spares: int, scene: RecoveryScene, count: int, chance: random.Random) -> Turn:
    """A job under `up`, with spares for so many replicas."""
    scene = replace(scene, sections={**scene.sections, "spares": spares * scene.ranks})
    with JobUnderTest(scene) as job:

        def then(kill: Kill) -> None:
            job.back(kill)
            job.spared(spares)

        job.spared(spares)
        made = list(hunt(job, count, chance, job.kill, then))
    return _turn(job, made, stages_in(job.events))


def torchft(scene: RecoveryScene, count: int, chance: random.Random) -> Turn:
    """Its Manager's loop, tuned; a process that was killed is started afresh at once."""
    with TorchftUnderTest(scene, KILLED["tuned"]) as job:

        def then(kill: Kill) -> None:
            job.start(kill.replica)
            job.back(kill)

        made = list(hunt(job, count, chance, lambda n, _: job.hit(n, signal.SIGKILL), then))
    return _turn(job, made, lambda kill, incarnation: ({"imports": job.loaded[kill.replica, incarnation]}, ""))


def _turn(job: UnderTest, made: Sequence[Kill], stages: Stages) -> Turn:
    step_s = job.step_s()
    found = [back(kill, job.rows[kill.replica], stages, step_s) for kill in made]
    backs = tuple(each for each in found if each is not None)
    if len(backs) < len(found):
        raise Retryable("bench: a replica that was killed did not log what it did afterwards")
    return Turn(step_s, backs)
