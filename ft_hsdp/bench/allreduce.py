"""`bench ftar`: the time of one all-reduce, every contender in turn, round after round (ABAB).

`bandwidth` is its only measure. `benchmarks.rings` runs others in the same way, in which members die.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import psutil

from ft_hsdp.bench import goals
from ft_hsdp.bench.contenders.base import CONTENDERS, Contender, absent
from ft_hsdp.bench.goals import Row, Verdicts, begin_result, finish_result
from ft_hsdp.bench.options import listed, measures_of, rounds_of, sizes_of
from ft_hsdp.bench.results import (
    KIB,
    MIB,
    ProgressLog,
    ResultRow,
    batch,
    interleave,
    ratio,
    size_name,
    spread,
)
from ft_hsdp.bench.workers.rings import WorkerRing, WorkerRings, check_memory
from ft_hsdp.errors import ConfigError

SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
IDLE_S = 0.5  # how long workers are watched while they have nothing to do
RESTLESS = 0.05  # of a core: more is noted
MOST_MEMBERS = 16


@dataclass(frozen=True, slots=True)
class AllReduceOptions:
    """What is measured; None where each measure has its own."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...] | None  # of messages, in bytes
    members: tuple[int, ...] | None
    contenders: tuple[str, ...] | None
    rounds: int


def options(args: Namespace) -> AllReduceOptions:
    """Return what `bench ftar` is to do."""
    return options_of(args, MEASURES)


def options_of(args: Namespace, measures: Mapping[str, Measure]) -> AllReduceOptions:
    """Return which of ``measures`` are meant, and of what. Raises ConfigError for words that are not allowed."""
    return AllReduceOptions(
        measures_of(args, tuple(measures)),
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


@dataclass(frozen=True, slots=True)
class Measure:
    """One thing that is measured; members, sizes and contenders are those where the user names none."""

    run: Callable[[Mapping[str, Contender], BenchPlan, ProgressLog], list[ResultRow]]
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    contenders: tuple[str, ...]
    unfit: Callable[[Contender], str] = lambda contender: ""  # why one cannot take part, "" if it can


MEASURES: dict[str, Measure] = {"bandwidth": Measure(bandwidth, (2, 4), SIZES, tuple(CONTENDERS))}


def run(options: AllReduceOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result of `bench ftar`; as `run_measures`."""
    return run_measures("ftar", MEASURES, goals.ftar, options, stream)


def run_measures(
    bench: str,
    measures: Mapping[str, Measure],
    verdicts: Callable[[Row], Verdicts],
    options: AllReduceOptions,
    stream: TextIO,
) -> dict[str, Any]:
    """Return the result, ready for JSON.

    Args:
        bench: its name.
        measures: all that it knows; ``options`` says which of them run.
        verdicts: yields its goals beside the figures of a result.
        options: what is measured.
        stream: where progress goes, a line for each figure.

    Raises:
        ConfigError: The machine does not allow what is asked.
        Retryable: A worker fails.
        DataCorruption: A sum is wrong.
    """
    log = ProgressLog(stream)
    todo = {name: _prepare(name, each, options) for name, each in measures.items() if name in options.measures}
    result, started = begin_result(bench, log)
    result["contenders"] = {}
    for name, (contenders, plan, left_out) in todo.items():
        for text in left_out:
            log.note(text)
        result["contenders"] |= {who: contender.text for who, contender in contenders.items()}
        result[name] = measures[name].run(contenders, plan, log)
    return finish_result(result, verdicts(result), log, started)


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
