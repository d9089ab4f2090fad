"""SIGKILL of one member in the middle of an all-reduce: when the others know, and when they sum again."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_hsdp.bench.arena import Arena
from ft_hsdp.bench.link import ask, collect
from ft_hsdp.bench.options import MIB, size_name
from ft_hsdp.bench.plan import Log, Measure, Plan, Row
from ft_hsdp.bench.roster import Contender
from ft_hsdp.bench.rounds import WARM_UP
from ft_hsdp.bench.spread import spread
from ft_hsdp.bench.team import Team
from ft_hsdp.errors import Retryable

MEMBERS = (8, 4)
SIZES = (64 * MIB,)
CONTENDERS = ("tcp", "shm")
MIDDLE = (0.2, 0.8)  # when the kill comes, as shares of an undisturbed all-reduce
TRIES = 3  # for each kill that counts: some come after the end


@dataclass(slots=True)
class Kills:
    """What was seen, in seconds. raised: each survivor's time from the kill to the raise; again: from the kill to
    the last survivor's next sum; one: of an undisturbed all-reduce of the survivors; finished: survivors that
    had all they needed and did not raise.
    """

    raised: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    one: list[float] = field(default_factory=list)
    finished: int = 0


def kill(contenders: Mapping[str, Contender], plan: Plan, log: Log) -> list[Row]:
    """A row for each contender, ring size and message size, over `rounds` kills.

    Raises Retryable where a worker fails or no kill hits, DataCorruption where the survivors' sum is wrong.
    """
    rows = []
    for members in plan.members:
        with Arena(contenders, members) as arena:
            for name in arena.teams:
                for size in plan.sizes:
                    kills = _kills(arena, name, size, plan.rounds)
                    rows.append(_row(name, members, size, plan.rounds, kills))
                    log.say(
                        f"{name}, {members} members, {size_name(size)}: survivors raise after "
                        f"p50 {rows[-1]['raise']['p50_ms']:.3g}, max {rows[-1]['raise']['max_ms']:.3g} ms"
                    )
    return rows


def _kills(arena: Arena, name: str, size: int, rounds: int) -> Kills:
    team = arena.teams[name]
    chance = random.Random(size)
    kills = Kills()
    team.prepare(size)
    team.check()
    usual = statistics.median([team.time() for _ in range(2 * WARM_UP)])
    hits = 0
    for number in range(TRIES * rounds):
        if hits == rounds:
            break
        hits += _one(team, number % arena.members, usual * chance.uniform(*MIDDLE), kills)
        arena.replace(name, number % arena.members)
        team.join(range(arena.members))
        team.prepare(size)
    if hits < rounds:
        raise Retryable(
            f"bench: only {hits} of {TRIES * rounds} kills of {name} hit an all-reduce; take larger sizes"
        )
    return kills


def _one(team: Team, victim: int, delay_s: float, kills: Kills) -> bool:
    """Kill `victim` in the middle of an all-reduce, sum again without it; whether a survivor raised."""
    survivors = [link for member, link in enumerate(team.links) if member != victim]
    start = team.start()
    time.sleep(max(0.0, start + delay_s - time.monotonic()))
    killed = team.links[victim].kill()
    answers = collect(survivors)
    raised = [float(answer["t"]) - killed for answer in answers if "raised" in answer]
    team.order.remove(victim)
    again = team.last(ask(team.active, team.membership("retry")))
    team.check()
    if raised:
        kills.raised += raised
        kills.finished += len(answers) - len(raised)
        kills.again.append(again - killed)
        kills.one.append(team.time())
    return bool(raised)


def _row(name: str, members: int, size: int, rounds: int, kills: Kills) -> Row:
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


def _unfit(contender: Contender) -> str:
    return "" if contender.recovers else "its survivors do not hear of a death in time"


KILL = Measure(kill, MEMBERS, SIZES, CONTENDERS, _unfit)
