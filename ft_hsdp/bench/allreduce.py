"""Time of one all-reduce, every contender in turn, round after round (ABAB).

What a thread of pure Python in a rank's process costs its all-reduce.

Beside it the same thread in a process of its own: that is what the loss of a core costs, whoever takes it; the
rest is the interpreter's lock.

SIGKILL of one member in the middle of an all-reduce: when the others know, and when they sum again.

Time to form a ring again under a new epoch: with the same order, and with every edge turned round.

`bench ftar`: chooses who takes part, runs the measures, and puts the result together.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

import psutil

from ft_hsdp.bench.contenders.roster import CONTENDERS, Contender, absent
from ft_hsdp.bench.goals import begin_result, finish_result, verdicts
from ft_hsdp.bench.hsdp.measure import measure as link
from ft_hsdp.bench.hsdp.scene import HsdpScene
from ft_hsdp.bench.options import KIB, MIB, AllReduceOptions, BenchPlan, Measure, ProgressLog, ResultRow, size_name
from ft_hsdp.bench.results import WARM_UP, batch, check_memory, interleave, ratio, spread
from ft_hsdp.bench.workers.arena import WorkerArena
from ft_hsdp.bench.workers.link import ask, collect
from ft_hsdp.bench.workers.team import Team
from ft_hsdp.errors import ConfigError, Retryable

BANDWIDTH_MEMBERS = (2, 4)
BANDWIDTH_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
IDLE_S = 0.5  # how long they are watched
RESTLESS = 0.05  # of a core: more is noted


def bandwidth(contenders: Mapping[str, Contender], plan: BenchPlan, log: ProgressLog) -> list[ResultRow]:
    """A row for each ring size and message size; a note about each contender that does not rest."""
    rows = []
    for members in plan.members:
        with WorkerArena(contenders, members) as arena:
            log.say(f"{members} members: {', '.join(arena.teams)}")
            for size in plan.sizes:
                rows.append(_size(arena, size, plan.rounds))
                log.say(f"{members} members, {size_name(size)}: {_medians(rows[-1])}")
            for name, share in _idle(arena).items():
                if share > RESTLESS:
                    log.note(f"{name} with {members} members used {share:.0%} of a core while it was idle")
    return rows


def _size(arena: WorkerArena, size: int, rounds: int) -> ResultRow:
    teams = list(arena.teams.values())
    arena.prepare(size)
    times = batch(size)
    seconds = interleave({team.name: partial(team.time, times) for team in teams}, rounds)
    found = {name: spread(values) for name, values in seconds.items()}
    return {
        "members": arena.members,
        "bytes": size,
        "rounds": rounds,
        "all_reduces_per_sample": times,
        "contenders": found,
        "times_as_fast": {name: _ratios(name, found) for name in found},
    }


def _ratios(name: str, found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How many times as fast as each other contender: ratios of medians."""
    own = found[name]["p50_ms"]
    return {other: ratio(times["p50_ms"], own) for other, times in found.items() if other != name}


def _idle(arena: WorkerArena) -> dict[str, float]:
    """Cores that each contender uses while it has nothing to do: more than none slows the others down."""
    start, before = time.monotonic(), {name: _cpu_s(team) for name, team in arena.teams.items()}
    time.sleep(IDLE_S)
    took = time.monotonic() - start
    return {name: (_cpu_s(team) - before[name]) / took for name, team in arena.teams.items()}


def _cpu_s(team: Team) -> float:
    times = [psutil.Process(link.pid).cpu_times() for link in team.links]
    return sum(t.user + t.system for t in times)


def _medians(row: ResultRow) -> str:
    return ", ".join(f"{name} {found['p50_ms']:.3g} ms" for name, found in row["contenders"].items())


BANDWIDTH = Measure(bandwidth, BANDWIDTH_MEMBERS, BANDWIDTH_SIZES, tuple(CONTENDERS))


SPIN_MEMBERS = (2,)
SPIN_SIZES = (64 * MIB,)
SPIN_CONTENDERS = ("tcp", "shm", "gloo")
MODES = ("idle", "thread", "process")


def spin(contenders: Mapping[str, Contender], plan: BenchPlan, log: ProgressLog) -> list[ResultRow]:
    """A row for each contender, ring size and message size: its time in each mode, and the speed that is left."""
    rows = []
    for members in plan.members:
        with WorkerArena(contenders, members) as arena:
            for size in plan.sizes:
                for row in _spin_size(arena, size, plan.rounds):
                    rows.append(row)
                    left = ", ".join(f"{mode} {share:.2f}" for mode, share in row["share_of_idle"].items())
                    log.say(f"{row['contender']}, {members} members, {size_name(size)}, speed left: {left}")
    return rows


def _spin_size(arena: WorkerArena, size: int, rounds: int) -> list[ResultRow]:
    teams = list(arena.teams.values())
    arena.prepare(size)
    samples = {
        (team.name, mode): partial(_sample, team, spinner, batch(size))
        for team in teams
        for mode, spinner in (("idle", None), ("thread", team), ("process", arena.bystander))
    }
    seconds = interleave(samples, rounds)
    rows = []
    for team in teams:
        modes = {mode: spread(seconds[team.name, mode]) for mode in MODES}
        left = {mode: ratio(modes["idle"]["p50_ms"], modes[mode]["p50_ms"]) for mode in MODES[1:]}
        row = {"contender": team.name, "members": arena.members, "bytes": size, "modes": modes}
        rows.append({**row, "share_of_idle": left})
    return rows


def _sample(team: Team, spinner: Team | None, times: int) -> float:
    """Seconds of an all-reduce while the first process of `spinner` spins."""
    if spinner is None:
        return team.time(times)
    spinner.spin(True)
    seconds = team.time(times)
    spinner.spin(False)
    return seconds


SPIN = Measure(spin, SPIN_MEMBERS, SPIN_SIZES, SPIN_CONTENDERS)


KILL_MEMBERS = (8, 4)
KILL_SIZES = (64 * MIB,)
KILL_CONTENDERS = ("tcp", "shm")
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


def kill(contenders: Mapping[str, Contender], plan: BenchPlan, log: ProgressLog) -> list[ResultRow]:
    """A row for each contender, ring size and message size, over `rounds` kills.

    Raises Retryable where a worker fails or no kill hits, DataCorruption where the survivors' sum is wrong.
    """
    rows = []
    for members in plan.members:
        with WorkerArena(contenders, members) as arena:
            for name in arena.teams:
                for size in plan.sizes:
                    kills = _kills(arena, name, size, plan.rounds)
                    rows.append(_row(name, members, size, plan.rounds, kills))
                    log.say(
                        f"{name}, {members} members, {size_name(size)}: survivors raise after "
                        f"p50 {rows[-1]['raise']['p50_ms']:.3g}, max {rows[-1]['raise']['max_ms']:.3g} ms"
                    )
    return rows


def _kills(arena: WorkerArena, name: str, size: int, rounds: int) -> Kills:
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


def _row(name: str, members: int, size: int, rounds: int, kills: Kills) -> ResultRow:
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


def _kill_unfit(contender: Contender) -> str:
    return "" if contender.recovers else "its survivors do not hear of a death in time"


KILL = Measure(kill, KILL_MEMBERS, KILL_SIZES, KILL_CONTENDERS, _kill_unfit)


RECONFIGURE_MEMBERS = (4,)
RECONFIGURE_CONTENDERS = ("tcp", "shm", "torchft")


def reconfigure(contenders: Mapping[str, Contender], plan: BenchPlan, log: ProgressLog) -> list[ResultRow]:
    """A row for each contender, ring size and kind of change: from a common start to the last that is ready."""
    rows = []
    for members in plan.members:
        with WorkerArena(contenders, members) as arena:
            samples: dict[tuple[str, str], Callable[[], float]] = {}
            for name, team in arena.teams.items():
                samples[name, "same"] = team.join
                samples[name, "reversed"] = lambda team=team: team.join(team.order[::-1])  # type: ignore[misc]
            for (name, change), seconds in interleave(samples, plan.rounds).items():
                rows.append({"contender": name, "members": members, "change": change, **spread(seconds)})
                log.say(f"{name}, {members} members, {change} order: {rows[-1]['p50_ms']:.3g} ms")
            arena.prepare(4 * KIB)
    return rows


def _reconfigure_unfit(contender: Contender) -> str:
    return "" if contender.reconfigures else "it cannot be reconfigured"


RECONFIGURE = Measure(reconfigure, RECONFIGURE_MEMBERS, (), RECONFIGURE_CONTENDERS, _reconfigure_unfit)


MEASURES: dict[str, Measure] = {
    "bandwidth": BANDWIDTH,
    "spin": SPIN,
    "kill": KILL,
    "reconfigure": RECONFIGURE,
}


def run(options: AllReduceOptions, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`, a line for each figure.

    Raises ConfigError where the machine does not allow what is asked, Retryable where a worker fails,
    DataCorruption where a sum is wrong.
    """
    log = ProgressLog(stream)
    todo = {
        name: _prepare(name, measure, options) for name, measure in MEASURES.items() if name in options.measures
    }
    result, started = begin_result("ftar", log)
    result["contenders"] = {}
    for name, measure in MEASURES.items():
        result[name] = []
        if name in todo:
            contenders, plan, left_out = todo[name]
            for text in left_out:
                log.note(text)
            result["contenders"] |= {who: contender.text for who, contender in contenders.items()}
            result[name] = measure.run(contenders, plan, log)
    result["link"] = link(HsdpScene(rounds=options.rounds), log) if "link" in options.measures else []
    return finish_result(result, verdicts(result), log, started)


def _prepare(
    name: str, measure: Measure, options: AllReduceOptions
) -> tuple[dict[str, Contender], BenchPlan, list[str]]:
    """Who takes part in a measure, what it does, who is left out and why. Raises ConfigError."""
    wanted = options.contenders or measure.contenders
    why = {who: absent(CONTENDERS[who]) or measure.unfit(CONTENDERS[who]) for who in wanted}
    left_out = [f"{who} is left out of {name}: {reason}" for who, reason in why.items() if reason]
    if all(why.values()):
        raise ConfigError("--contenders", ",".join(wanted), f"one that can take part ({'; '.join(left_out)})")
    contenders = {who: CONTENDERS[who] for who in wanted if not why[who]}
    plan = BenchPlan(options.members or measure.members, options.sizes or measure.sizes, options.rounds)
    check_memory(contenders.values(), max(plan.members), max(plan.sizes, default=0))
    return contenders, plan, left_out
