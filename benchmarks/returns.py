"""`bench return`: a killed replica's own next commit, from a warm spare, cold, and of torchft; in turns."""

from __future__ import annotations

import random
import signal
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TextIO

from benchmarks.command import kills_of
from benchmarks.jobs import (
    RECENT,
    SEED,
    TRAIN,
    TRANSFORMER,
    JobUnderTest,
    Kill,
    Setup,
    TorchftUnderTest,
    UnderTest,
    hit_at_random,
)
from benchmarks.recovery import SETTINGS, installed, span
from benchmarks.results import (
    ProgressLog,
    ResultRow,
    Verdicts,
    begin_result,
    finish_result,
    milliseconds,
    most,
    ratio_interval,
)
from ft_hsdp.analysis.incarnations import incarnations
from ft_hsdp.errors import Retryable
from ft_hsdp.launch.run.directory import Row, read_json

PEER = "torchft"
TURNS = 3  # of each contender; one job runs at a time
QUICKSTART: Mapping[str, Any] = {
    "train": {**TRAIN, "micro_batch": 4, "seq_len": 128},
    "model": {"dim": 160, "layers": 6, "heads": 5},
}
SETUPS: Mapping[str, Setup] = {
    "waiting": Setup(),
    "2 M parameters": Setup(replicas=2, model=TRANSFORMER, sections=QUICKSTART),
}
MOST: Mapping[str, int] = {"waiting": 12, "2 M parameters": 6}  # kills of each contender
WARM_MS, COLD_TIMES = 500.0, 1.0  # the goals

STAGES: Mapping[str, str] = {
    "start": "started",
    "warm-up": "warmed",
    "check-in": "checked_in",
    "grant": "granted",
    "fetch": "fetched",
}
"""The stage of an `IncarnationRecord` that ends each phase of a return.

The first phase, before these, ends with the exit of the victim, the last one, LAST, with the commit.
"""

LAST = "step"

Stages = Callable[[Kill, str], tuple[Mapping[str, float | None], str]]
"""When each phase of a return was over, in their order, and how the incarnation of that name was started."""


@dataclass(frozen=True, slots=True)
class Back:
    """How the victim of a kill came back, as it logged it itself."""

    commit_s: float  # from the kill to its own next commit
    less_one_s: float  # the same less one fault-free step
    contribute_s: float  # from the kill to its next contribution
    phases: Mapping[str, float]  # add up to commit_s
    how: str = ""  # how its supervisor started it; "": not known


def stages_in(events: Iterable[Row]) -> Stages:
    """Return the stages of all returns that ``events`` tell of."""
    records = incarnations(events)

    def stages(kill: Kill, incarnation: str) -> tuple[Mapping[str, float | None], str]:
        old, new = records[kill.replica, kill.incarnation], records[kill.replica, incarnation]
        return {"exit": old.exited, **{phase: getattr(new, stage) for phase, stage in STAGES.items()}}, new.how

    return stages


def back(kill: Kill, rows: Sequence[Row], stages: Stages, step_s: float) -> Back | None:
    """Return how the victim of ``kill`` came back; None where it did not. ``rows``: its own commits."""
    after = [row for row in rows if row["t"] > kill.t and row["incarnation"] != kill.incarnation]
    full = next((row for row in after if row["role"] == "contribute"), None)
    if full is None:
        return None
    first = after[0]
    ends, how = stages(kill, first["incarnation"])
    took = first["t"] - kill.t
    return Back(took, took - step_s, full["t"] - kill.t, return_phases(kill.t, ends, first["t"]), how)


def return_phases(start: float, ends: Mapping[str, float | None], end: float) -> dict[str, float]:
    """Return how long each phase lasted: from the end of those before it to its own.

    A phase that was over by then, or whose end is not known, took no time.
    """
    found, now = {}, start
    for name, t in ends.items():
        over = min(max(now, t or now), end)
        found[name], now = over - now, over
    return {**found, LAST: end - now}


def options(args: Namespace) -> int:
    """Return how many kills `bench return` makes at most, of each contender and model."""
    return kills_of(args, max(MOST.values()))


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench return`."""
    for row in result["return"]:
        text = "SIGKILL to own commit - 1 step"
        warm_ms = row["contenders"]["warm"]["less_one"]["p50_ms"]
        yield most(f"{text}, warm, p50 ms", row, WARM_MS, warm_ms)
        if "cold" in row["times"]:
            yield most(f"{text}, cold / torchft's", row, COLD_TIMES, row["times"]["cold"]["ratio"])


def run(count: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("return", log)
    result["return"] = returns(count, log)
    return finish_result(result, goals(result), log, started)


@dataclass(frozen=True, slots=True)
class Turn:
    """One job from its start to its end."""

    step_s: float  # fault-free
    backs: tuple[Back, ...]


Contender = Callable[[Setup, int, random.Random], Turn]
"""Runs a job of a setup and kills so often."""


def returns(most: int, log: ProgressLog, setups: Mapping[str, Setup] = SETUPS) -> list[ResultRow]:
    """Return a row for each of ``setups``, with at most ``most`` kills of each contender. Raises Retryable."""
    contenders: dict[str, Contender] = {"warm": partial(our_turn, 1), "cold": partial(our_turn, 0)}
    if installed(log):
        contenders[PEER] = torchft_turn
    return [_measure(name, setup, min(most, MOST[name]), contenders, log) for name, setup in setups.items()]


def _measure(
    name: str, setup: Setup, count: int, contenders: Mapping[str, Contender], log: ProgressLog
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


def return_row(name: str, setup: Setup, turns: Mapping[str, Sequence[Turn]]) -> ResultRow:
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


def our_turn(spares: int, setup: Setup, count: int, chance: random.Random) -> Turn:
    """Kill ranks of a job under `up`, with spares for so many replicas."""
    setup = replace(setup, sections={**setup.sections, "spares": spares * setup.ranks})
    with JobUnderTest(setup) as job:

        def then(kill: Kill) -> None:
            wait_for_return(job, kill)
            wait_for_spares(job, spares)

        wait_for_spares(job, spares)
        done = list(hit_at_random(job, count, chance, job.kill, then))
    return _turn(job, done, stages_in(job.events))


def torchft_turn(setup: Setup, count: int, chance: random.Random) -> Turn:
    """Kill replicas of torchft's loop, tuned; a process that was killed is started afresh at once."""
    with TorchftUnderTest(setup, SETTINGS[signal.SIGKILL]["tuned"]) as job:

        def then(kill: Kill) -> None:
            job.start(kill.replica)
            wait_for_return(job, kill)

        done = list(hit_at_random(job, count, chance, lambda n, _: job.hit(n, signal.SIGKILL), then))
    return _turn(job, done, lambda kill, incarnation: ({"imports": job.loaded[kill.replica, incarnation]}, ""))


def wait_for_return(job: UnderTest, kill: Kill) -> None:
    """Wait until the victim, started again, has contributed to a step. Raises Retryable."""

    def there(row: Row) -> bool:
        return row["t"] > kill.t and row["incarnation"] != kill.incarnation and row["role"] == "contribute"

    rows = job.rows[kill.replica]
    job.wait(lambda: any(map(there, rows[-RECENT:])), "the replica contributes again")


def wait_for_spares(job: JobUnderTest, spares: int) -> None:
    """Wait until so many spares are ready; each is as many processes as a replica has. Raises Retryable."""

    def ready() -> bool:
        shown = (read_json(job.run.spares / "spares.json") or {}).get("spares", [])
        return sum(spare["state"] == "ready" for spare in shown) >= spares

    job.wait(lambda: not spares or ready(), f"{spares} spares are ready")


def _turn(job: UnderTest, done: Sequence[Kill], stages: Stages) -> Turn:
    step_s = job.step_s()
    found = [back(kill, job.rows[kill.replica], stages, step_s) for kill in done]
    backs = tuple(each for each in found if each is not None)
    if len(backs) < len(found):
        raise Retryable("bench: a replica that was killed did not log what it did afterwards")
    return Turn(step_s, backs)
