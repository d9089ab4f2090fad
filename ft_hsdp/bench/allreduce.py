"""`bench ftar`: one all-reduce beside its contenders, undisturbed, beside a busy thread, and when a member dies.

- bandwidth: the time of one all-reduce, every contender in turn, round after round (ABAB);
- spin: what a thread of pure Python in a rank's process costs its all-reduce. The same thread in a process of its
  own shows what the loss of a core costs; the rest is the interpreter's lock;
- kill: SIGKILL of one member in the middle of an all-reduce: when the others know, and when they sum again;
- reconfigure: the time to form a ring again under a new epoch, in the same order and with every edge turned round;
- link: what the exchange between replicas costs a training step (`bench.hsdp`).
"""

from __future__ import annotations

import random
import re
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

import psutil

from ft_hsdp.bench import goals
from ft_hsdp.bench.contenders.base import CONTENDERS, Contender, absent
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.hsdp.measure import measure as link
from ft_hsdp.bench.hsdp.processes import HsdpSetup
from ft_hsdp.bench.options import listed, measures_of, rounds_of, sizes_of
from ft_hsdp.bench.results import (
    KIB,
    MIB,
    WARM_UP,
    ProgressLog,
    ResultRow,
    batch,
    interleave,
    ratio,
    size_name,
    spread,
)
from ft_hsdp.bench.workers.link import ask, collect
from ft_hsdp.bench.workers.rings import WorkerRing, WorkerRings, check_memory
from ft_hsdp.errors import ConfigError, Retryable

SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
IDLE_S = 0.5  # how long workers are watched while they have nothing to do
RESTLESS = 0.05  # of a core: more is noted
MODES = ("idle", "thread", "process")  # who spins: nothing, a thread in a rank, another process
MIDDLE = (0.2, 0.8)  # when the kill comes, as shares of an undisturbed all-reduce
MOST_MEMBERS = 16
FTAR = ("bandwidth", "spin", "kill", "reconfigure", "link")
TRIES = 3  # for each kill that counts: some come after the end


@dataclass(frozen=True, slots=True)
class AllReduceOptions:
    """What `bench ftar` measures; None where each measure has its own."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...] | None  # of messages, in bytes
    members: tuple[int, ...] | None
    contenders: tuple[str, ...] | None
    rounds: int


def options(args: Namespace) -> AllReduceOptions:
    """Return what `bench ftar` is to do."""
    return AllReduceOptions(
        measures_of(args, FTAR, "bandwidth"),
        sizes_of(args),
        listed("--members", args.members, _members, f"2 to {MOST_MEMBERS}, e.g. 2,4"),
        listed("--contenders", args.contenders, _contender, f"some of {','.join(CONTENDERS)}"),
        rounds_of(args, 20),
    )


def _members(word: str) -> int | None:
    return int(word) if re.fullmatch(r"\d{1,3}", word) and 2 <= int(word) <= MOST_MEMBERS else None


def _contender(word: str) -> str | None:
    return word if word in CONTENDERS else None


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Ring sizes, message sizes in bytes, and how often."""

    members: tuple[int, ...]
    sizes: tuple[int, ...]
    rounds: int


def bandwidth(contenders: Mapping[str, Contender], plan: BenchPlan, log: ProgressLog) -> list[ResultRow]:
    """Return a row for each ring size and message size; a note tells of each contender that does not rest."""
    rows = []
    for members in plan.members:
        with WorkerRings(contenders, members) as all_rings:
            log.say(f"{members} members: {', '.join(all_rings.rings)}")
            for size in plan.sizes:
                rows.append(row := _bandwidth(all_rings, size, plan.rounds))
                medians = ", ".join(f"{name} {each['p50_ms']:.3g} ms" for name, each in row["contenders"].items())
                log.say(f"{members} members, {size_name(size)}: {medians}")
            for name, share in _idle(all_rings).items():
                if share > RESTLESS:
                    log.note(f"{name} with {members} members used {share:.0%} of a core while it was idle")
    return rows


def _bandwidth(all_rings: WorkerRings, size: int, rounds: int) -> ResultRow:
    all_rings.prepare(size)
    times = batch(size)
    seconds = interleave({name: partial(ring.time, times) for name, ring in all_rings.rings.items()}, rounds)
    found = {name: spread(values) for name, values in seconds.items()}
    as_fast = {
        name: {other: ratio(each["p50_ms"], own["p50_ms"]) for other, each in found.items() if other != name}
        for name, own in found.items()
    }
    return {
        "members": all_rings.members,
        "bytes": size,
        "rounds": rounds,
        "all_reduces_per_sample": times,
        "contenders": found,
        "times_as_fast": as_fast,
    }


def _idle(all_rings: WorkerRings) -> dict[str, float]:
    """Return the share of a core that each contender's workers use while they have nothing to do."""
    start, before = time.monotonic(), {name: _cpu_s(ring) for name, ring in all_rings.rings.items()}
    time.sleep(IDLE_S)
    took = time.monotonic() - start
    return {name: (_cpu_s(ring) - before[name]) / took for name, ring in all_rings.rings.items()}


def _cpu_s(ring: WorkerRing) -> float:
    times = [psutil.Process(link.pid).cpu_times() for link in ring.links]
    return sum(t.user + t.system for t in times)


def spin(contenders: Mapping[str, Contender], plan: BenchPlan, log: ProgressLog) -> list[ResultRow]:
    """Return a row for each contender, ring size and message size: time in each mode, speed that is left."""
    rows = []
    for members in plan.members:
        with WorkerRings(contenders, members) as all_rings:
            for size in plan.sizes:
                for row in _spin(all_rings, size, plan.rounds):
                    rows.append(row)
                    left = ", ".join(f"{mode} {share:.2f}" for mode, share in row["share_of_idle"].items())
                    log.say(f"{row['contender']}, {members} members, {size_name(size)}, speed left: {left}")
    return rows


def _spin(all_rings: WorkerRings, size: int, rounds: int) -> list[ResultRow]:
    all_rings.prepare(size)
    samples = {
        (name, mode): partial(_beside, ring, spinner, batch(size))
        for name, ring in all_rings.rings.items()
        for mode, spinner in zip(MODES, (None, ring, all_rings.bystander), strict=True)
    }
    seconds = interleave(samples, rounds)
    rows = []
    for name in all_rings.rings:
        modes = {mode: spread(seconds[name, mode]) for mode in MODES}
        left = {mode: ratio(modes["idle"]["p50_ms"], modes[mode]["p50_ms"]) for mode in MODES[1:]}
        row = {"contender": name, "members": all_rings.members, "bytes": size, "modes": modes}
        rows.append({**row, "share_of_idle": left})
    return rows


def _beside(ring: WorkerRing, spinner: WorkerRing | None, times: int) -> float:
    """Return the seconds of an all-reduce while the first process of ``spinner`` spins."""
    if spinner is None:
        return ring.time(times)
    spinner.spin(True)
    seconds = ring.time(times)
    spinner.spin(False)
    return seconds


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
    ring.check()
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
    killed = ring.links[victim].kill()
    answers = collect(survivors)
    raised = [float(answer["t"]) - killed for answer in answers if "raised" in answer]
    ring.order.remove(victim)
    again = ring.last(ask(ring.active, ring.membership("retry")))
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


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that is measured; members, sizes and contenders are those where the user names none."""

    run: Callable[[Mapping[str, Contender], BenchPlan, ProgressLog], list[ResultRow]]
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    contenders: tuple[str, ...]
    unfit: Callable[[Contender], str] = lambda contender: ""  # why one cannot take part, "" if it can


def _does_not_recover(contender: Contender) -> str:
    return "" if contender.recovers else "its survivors do not hear of a death in time"


def _does_not_reconfigure(contender: Contender) -> str:
    return "" if contender.reconfigures else "it cannot be reconfigured"


MEASURES: dict[str, Measure] = {
    "bandwidth": Measure(bandwidth, (2, 4), SIZES, tuple(CONTENDERS)),
    "spin": Measure(spin, (2,), (64 * MIB,), ("tcp", "shm", "gloo")),
    "kill": Measure(kill, (8, 4), (64 * MIB,), ("tcp", "shm"), _does_not_recover),
    "reconfigure": Measure(reconfigure, (4,), (), ("tcp", "shm", "torchft"), _does_not_reconfigure),
}


def run(options: AllReduceOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``, a line for each figure.

    Raises:
        ConfigError: The machine does not allow what is asked.
        Retryable: A worker fails.
        DataCorruption: A sum is wrong.
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
    result["link"] = link(HsdpSetup(rounds=options.rounds), log) if "link" in options.measures else []
    return finish_result(result, goals.ftar(result), log, started)


def _prepare(
    name: str, measure: Measure, options: AllReduceOptions
) -> tuple[dict[str, Contender], BenchPlan, list[str]]:
    """Return who takes part in a measure, what it does, who is left out and why. Raises ConfigError."""
    wanted = options.contenders or measure.contenders
    why = {who: absent(CONTENDERS[who]) or measure.unfit(CONTENDERS[who]) for who in wanted}
    left_out = [f"{who} is left out of {name}: {reason}" for who, reason in why.items() if reason]
    if all(why.values()):
        raise ConfigError("--contenders", ",".join(wanted), f"one that can take part ({'; '.join(left_out)})")
    contenders = {who: CONTENDERS[who] for who in wanted if not why[who]}
    plan = BenchPlan(options.members or measure.members, options.sizes or measure.sizes, options.rounds)
    check_memory(contenders.values(), max(plan.members), max(plan.sizes, default=0))
    return contenders, plan, left_out
