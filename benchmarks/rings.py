"""`bench rings`: a member of an all-reduce dies, and how soon a ring is formed again.

- kill: SIGKILL of one member in the middle of an all-reduce: when the others know, and when they sum again;
- reconfigure: the time to form a ring again under a new epoch, in the same order and with every edge turned round.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from ft_hsdp.bench.allreduce import (
    AllReduceOptions,
    Contender,
    WorkerRing,
    WorkerRings,
    check_memory,
    options_of,
    taking_part,
)
from ft_hsdp.bench.command import KIB, MIB
from ft_hsdp.bench.processes import collect
from ft_hsdp.bench.processes import kill as kill_now
from ft_hsdp.bench.results import (
    WARM_UP,
    ProgressLog,
    ResultRow,
    Row,
    Verdicts,
    begin_result,
    finish_result,
    interleave,
    most,
    size_name,
    spread,
)
from ft_hsdp.errors import Retryable

MIDDLE = (0.2, 0.8)  # when the kill comes, as shares of an undisturbed all-reduce
TRIES = 3  # for each kill that counts: some come after the end

RAISE_P50_MS, RAISE_MAX_MS = 50.0, 150.0
NEXT_SUM_MS = 150.0
RECONFIGURE_MS = 10.0


def options(args: Namespace) -> AllReduceOptions:
    """Return what `bench rings` is to do."""
    return options_of(args, tuple(MEASURES))


def goals(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench rings`."""
    for row in result.get("kill", ()):
        text = f"{row['contender']}: kill to"
        if row["members"] == 8:
            yield most(f"{text} raise, p50 ms", row, RAISE_P50_MS, row["raise"]["p50_ms"])
            yield most(f"{text} raise, max ms", row, RAISE_MAX_MS, row["raise"]["max_ms"])
        if row["members"] == 4:
            yield most(f"{text} next sum - 1, max ms", row, NEXT_SUM_MS, row["next_less_one"]["max_ms"])
    for row in result.get("reconfigure", ()):
        if row["members"] == 4 and row["contender"] != "torchft":
            text = f"{row['contender']} reconfigures, {row['change']} order, ms"
            yield most(text, row, RECONFIGURE_MS, row["p50_ms"])


def run(options: AllReduceOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``, a line for each figure.

    Raises:
        ConfigError: The machine does not allow what is asked.
        Retryable: A worker fails.
        DataCorruption: A sum is wrong.
    """
    log, todo = ProgressLog(stream), {}
    for name in options.measures:
        each = MEASURES[name]
        contenders = taking_part(name, options.contenders or each.contenders, log, each.unfit)
        plan = BenchPlan(options.members or each.members, options.sizes or each.sizes, options.rounds)
        check_memory(contenders.values(), max(plan.members), max(plan.sizes, default=0))
        todo[name] = contenders, plan
    result, started = begin_result("rings", log)
    result["contenders"] = {who: each.text for contenders, _ in todo.values() for who, each in contenders.items()}
    for name, (contenders, plan) in todo.items():
        result[name] = MEASURES[name].run(contenders, plan, log)
    return finish_result(result, goals(result), log, started)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Ring sizes, message sizes in bytes, and how often."""

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    rounds: int


@dataclass(slots=True)
class RingKills:
    """What was seen of some kills, in seconds."""

    raised: list[float] = field(default_factory=list)  # of each survivor, from the kill to the raise
    again: list[float] = field(default_factory=list)  # from the kill to the last survivor's next sum
    one: list[float] = field(default_factory=list)  # an undisturbed all-reduce of the survivors
    finished: int = 0  # survivors that had all they needed and did not raise


def kill(contenders: Mapping[str, Contender], plan: BenchPlan, log: ProgressLog) -> list[ResultRow]:
    """Return a row for each contender, ring size and message size, over so many kills.

    Raises:
        Retryable: A worker fails, or no kill hits.
        DataCorruption: The survivors' sum is wrong.
    """
    rows = []
    for members in plan.members:
        with WorkerRings(contenders, members) as all_rings:
            for name in all_rings.rings:
                for size in plan.sizes:
                    rows.append(row := _kills(all_rings, name, size, plan.rounds))
                    p50_ms, max_ms = row["raise"]["p50_ms"], row["raise"]["max_ms"]
                    log.say(
                        f"{name}, {members} members, {size_name(size)}: survivors raise after "
                        f"p50 {p50_ms:.3g}, max {max_ms:.3g} ms"
                    )
    return rows


def _kills(all_rings: WorkerRings, name: str, size: int, rounds: int) -> ResultRow:
    ring, members = all_rings.rings[name], all_rings.members
    chance = random.Random(size)
    kills = RingKills()
    ring.prepare(size)
    usual = statistics.median([ring.time() for _ in range(2 * WARM_UP)])
    hits = 0
    for number in range(TRIES * rounds):
        if hits == rounds:
            break
        hits += _kill_one(ring, number % members, usual * chance.uniform(*MIDDLE), kills)
        all_rings.replace(name, number % members)
        ring.join(range(members))
        ring.prepare(size)
    if hits < rounds:
        raise Retryable(
            f"bench: only {hits} of {TRIES * rounds} kills of {name} hit an all-reduce; take larger sizes"
        )
    one = statistics.median(kills.one)
    return {
        "contender": name,
        "members": members,
        "bytes": size,
        "kills": rounds,
        "raise": spread(kills.raised),
        "finished": kills.finished,
        "all_reduce": spread(kills.one),
        "next": spread(kills.again),
        "next_less_one": spread([again - one for again in kills.again]),
    }


def _kill_one(ring: WorkerRing, victim: int, delay_s: float, kills: RingKills) -> bool:
    """Kill a member in the middle of an all-reduce, sum again without it; return whether a survivor raised."""
    survivors = [link for member, link in enumerate(ring.links) if member != victim]
    start = ring.start()
    time.sleep(max(0.0, start + delay_s - time.monotonic()))
    killed = time.monotonic()
    kill_now(ring.links[victim].process)
    answers = collect(survivors)
    raised = [float(answer["t"]) - killed for answer in answers if "raised" in answer]
    ring.order.remove(victim)
    ring.join()
    ring.start()
    again = ring.last(collect(ring.active))
    ring.check()
    if raised:
        kills.raised += raised
        kills.finished += len(answers) - len(raised)
        kills.again.append(again - killed)
        kills.one.append(ring.time())
    return bool(raised)


def reconfigure(contenders: Mapping[str, Contender], plan: BenchPlan, log: ProgressLog) -> list[ResultRow]:
    """Return a row for each contender, ring size and change: from a common start until all are ready."""
    rows = []
    for members in plan.members:
        with WorkerRings(contenders, members) as all_rings:
            samples: dict[tuple[str, str], Callable[[], float]] = {}
            for name, ring in all_rings.rings.items():
                samples[name, "same"] = ring.join
                samples[name, "reversed"] = partial(_reverse, ring)
            for (name, change), seconds in interleave(samples, plan.rounds).items():
                rows.append({"contender": name, "members": members, "change": change, **spread(seconds)})
                log.say(f"{name}, {members} members, {change} order: {rows[-1]['p50_ms']:.3g} ms")
            all_rings.prepare(4 * KIB)
    return rows


def _reverse(ring: WorkerRing) -> float:
    return ring.join(ring.order[::-1])


def _does_not_recover(contender: Contender) -> str:
    return "" if contender.recovers else "its survivors do not hear of a death in time"


def _does_not_reconfigure(contender: Contender) -> str:
    return "" if contender.reconfigures else "it cannot be reconfigured"


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that is measured; members, sizes and contenders are those where the user names none."""

    run: Callable[[Mapping[str, Contender], BenchPlan, ProgressLog], list[ResultRow]]
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    contenders: tuple[str, ...]
    unfit: Callable[[Contender], str]  # returns why one cannot take part, "" if it can


MEASURES: dict[str, Measure] = {
    "kill": Measure(kill, (8, 4), (64 * MIB,), ("tcp", "shm"), _does_not_recover),
    "reconfigure": Measure(reconfigure, (4,), (), ("tcp", "shm", "torchft"), _does_not_reconfigure),
}
