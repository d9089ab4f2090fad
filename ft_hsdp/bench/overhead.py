"""`bench overhead`: what fault tolerance costs while nothing fails.

- steady: a step of ft_hsdp beside the same step of PyTorch's HSDP, which survives nothing;
- snapshot: a snapshot of each step beside none: of steps that compute, and that wait as beside an accelerator.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TextIO

from ft_hsdp.bench import goals
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.hsdp.processes import (
    PRODUCT,
    HsdpSetup,
    Loopback,
    start,
    start_lighthouse,
)
from ft_hsdp.bench.options import measures_of, rounds_of
from ft_hsdp.bench.results import ProgressLog, ResultRow, interleave, ratio_interval, spread
from ft_hsdp.bench.scope import scratch
from ft_hsdp.bench.workers.link import greet

ROUNDS = {"steady": 70, "snapshot": 30}  # where the user does not say
TRANSPORTS = ("tcp", "shm")
SETUP = HsdpSetup(
    sections={"train": {"micro_batch": 2, "seq_len": 128}, "model": {"dim": 192, "layers": 6, "heads": 6}}
)
SNAPSHOTS: Mapping[str, str] = {"without": "on_demand", "without again": "on_demand", "with": "every_step"}
SNAPSHOT_SETUPS: Mapping[str, HsdpSetup] = {"computing": SETUP, "waiting": replace(SETUP, waiting=(1 << 18, 0.5))}


def options(args: Namespace) -> Mapping[str, int]:
    """Return the rounds of each measure that is wanted."""
    return {name: rounds_of(args, ROUNDS[name]) for name in measures_of(args, tuple(ROUNDS))}


def run(rounds: Mapping[str, int], stream: TextIO) -> dict[str, Any]:
    """Return the result of the measures in ``rounds``, ready for JSON. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("overhead", log)
    result["steady"] = steady(rounds["steady"], log) if "steady" in rounds else []
    result["snapshot"] = snapshot(rounds["snapshot"], log) if "snapshot" in rounds else []
    return finish_result(result, goals.overhead(result), log, started)


@dataclass(frozen=True, slots=True)
class Trained:
    """One contender: its kind ("hsdp" or "ft_hsdp") and what it trains."""

    kind: str
    setup: HsdpSetup


def in_turns(
    contenders: Mapping[str, Trained],
    rounds: int,
    python: str = sys.executable,
) -> dict[str, list[float]]:
    """Train all contenders on this machine, all alive, one block of one of them at a time (ABAB).

    Args:
        contenders: by name.
        rounds: how many blocks of each count.
        python: the interpreter of all processes.

    Returns:
        Seconds of a step, of each of so many blocks, by contender.

    Raises:
        Retryable: A process fails.
    """
    with scratch() as (stack, folder):
        place = Loopback(python)
        samples: dict[str, Callable[[], float]] = {}
        for number, (name, each) in enumerate(contenders.items()):
            own = folder / str(number)
            own.mkdir()
            if each.kind == PRODUCT:
                start_lighthouse(place, each.setup, own, stack)
            processes = start(name, each.kind, number, place, each.setup, own, stack)
            greet(processes.links)  # one after the other: two dozen imports at once take too long
            samples[name] = partial(processes.train, each.setup.steps)
        return interleave(samples, rounds)


def _compared(took: Mapping[str, list[float]], anchor: str) -> dict[str, dict[str, float]]:
    """Return how many times as long as the anchor's each other contender's step takes."""
    return {name: ratio_interval(seconds, took[anchor]) for name, seconds in took.items() if name != anchor}


def steady(
    rounds: int,
    log: ProgressLog,
    setup: HsdpSetup = SETUP,
    transports: tuple[str, ...] = TRANSPORTS,
    python: str = sys.executable,
) -> list[ResultRow]:
    """Return a row: steps of HSDP, of a second HSDP (the method's own noise), of ft_hsdp over each transport.

    Between machines ft_hsdp uses TCP, as HSDP's gloo always does. Raises Retryable where a process fails.
    """
    contenders = {"hsdp": Trained("hsdp", setup), "hsdp again": Trained("hsdp", setup)}
    for transport in transports:
        sections = {**setup.sections, "ftar": {"transport": transport}}
        contenders[f"ft_hsdp, {transport}"] = Trained(PRODUCT, replace(setup, sections=sections))
    took = in_turns(contenders, rounds, python)
    row: ResultRow = {
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "rounds": rounds,
        "crews": {name: spread(seconds) for name, seconds in took.items()},
        "times": _compared(took, "hsdp"),
    }
    for name, found in row["times"].items():
        log.say(f"{name}: {found['ratio']:.3f} times HSDP's step ({found['low']:.3f} to {found['high']:.3f})")
    return [row]


def snapshot(rounds: int, log: ProgressLog, setups: Mapping[str, HsdpSetup] = SNAPSHOT_SETUPS) -> list[ResultRow]:
    """Return a row for each kind of step. Raises Retryable where a process fails."""
    rows = []
    for kind, setup in setups.items():
        contenders = {
            name: Trained(PRODUCT, replace(setup, sections={**setup.sections, "state": {"snapshot": mode}}))
            for name, mode in SNAPSHOTS.items()
        }
        took = in_turns(contenders, rounds)
        row: ResultRow = {
            "step": kind,
            "replicas": setup.replicas,
            "ranks": setup.ranks,
            "rounds": rounds,
            "modes": {name: spread(seconds) for name, seconds in took.items()},
            "times": _compared(took, "without"),
        }
        rows.append(row)
        log.say(f"{kind}: a snapshot each step makes it {row['times']['with']['ratio']:.3f} times as long")
    return rows
