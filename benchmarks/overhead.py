"""`bench overhead`: what fault tolerance costs while nothing fails.

A step of ft_hsdp is taken beside the same step of PyTorch's HSDP, which survives nothing.

All contenders are alive at once, and each trains a block of steps while the others wait, so that what else runs on
the machine slows all of them. Between two blocks each rank (`training`) stands before its next step.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from benchmarks.command import measures_of, rounds_of
from benchmarks.jobs import (
    PATIENCE_S,
    PRODUCT,
    TRAIN,
    TRAINING,
    TRANSFORMER,
    RankSpec,
    Setup,
    job_config,
)
from benchmarks.processes import LOOPBACK, WorkerLink, ask, greet, listening, scratch, spawn, spawn_worker
from benchmarks.results import (
    ProgressLog,
    ResultRow,
    Row,
    Verdicts,
    begin_result,
    finish_result,
    interleave,
    most,
    ratio_interval,
    spread,
)
from ft_hsdp.config import dump
from ft_hsdp.launch.backend.processes import free_port, tied
from ft_hsdp.launch.run.directory import RunDir, write_job_files
from ft_hsdp.secret import TOKEN_VARIABLE, worker_token

TRANSPORTS = ("tcp", "shm")
LEAD_S = 0.005  # from the command to the common start
SETUP = Setup(
    replicas=3,
    ranks=2,
    model=TRANSFORMER,
    sections={
        "train": {**TRAIN, "micro_batch": 2, "seq_len": 128},
        "model": {"dim": 192, "layers": 6, "heads": 6},
        "ftar": {"timeout_s": PATIENCE_S},
    },
)
STEADY = 1.02  # the goal


def options(args: Namespace) -> int:
    """Return how many blocks of each contender `bench overhead` takes."""
    measures_of(args, ("steady",))
    return rounds_of(args, 70)


def goals(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench overhead`."""
    for row in result["steady"]:
        for name, times in row["times"].items():
            if name.startswith("ft_hsdp"):
                yield most(f"{name}: a step, times HSDP's", row, STEADY, times["ratio"])


def run(rounds: int, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("overhead", log)
    result["steady"] = steady(rounds, log)
    return finish_result(result, goals(result), log, started)


def in_turns(contenders: Mapping[str, tuple[str, Setup]], rounds: int) -> dict[str, list[float]]:
    """Train all contenders on this machine, all alive, one block of one of them at a time (ABAB).

    Args:
        contenders: kind and setup, by name.
        rounds: how many blocks of each count.

    Returns:
        Seconds of a step, of each of so many blocks, by contender.

    Raises:
        Retryable: A process fails.
    """
    with scratch() as (stack, folder):
        samples: dict[str, Callable[[], float]] = {}
        for number, (name, (kind, setup)) in enumerate(contenders.items()):
            own = folder / str(number)
            own.mkdir()
            links = start(name, kind, setup, own, stack)
            greet(links)  # one after the other: two dozen imports at once take too long
            samples[name] = partial(train, links, setup.steps)
        return interleave(samples, rounds)


def steady(
    rounds: int,
    log: ProgressLog,
    setup: Setup = SETUP,
    transports: tuple[str, ...] = TRANSPORTS,
) -> list[ResultRow]:
    """Return a row: steps of HSDP, of a second HSDP (the method's own noise), of ft_hsdp over each transport.

    Between machines ft_hsdp uses TCP, as HSDP's gloo always does. Raises Retryable where a process fails.
    """
    contenders: dict[str, tuple[str, Setup]] = {"hsdp": ("hsdp", setup), "hsdp again": ("hsdp", setup)}
    for transport in transports:
        sections = {**setup.sections, "ftar": {"timeout_s": PATIENCE_S, "transport": transport}}
        contenders[f"ft_hsdp, {transport}"] = (PRODUCT, replace(setup, sections=sections))
    took = in_turns(contenders, rounds)
    row: ResultRow = {
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "rounds": rounds,
        "crews": {name: spread(seconds) for name, seconds in took.items()},
        "times": {name: ratio_interval(took[name], took["hsdp"]) for name in took if name != "hsdp"},
    }
    for name, found in row["times"].items():
        log.say(f"{name}: {found['ratio']:.3f} times HSDP's step ({found['low']:.3f} to {found['high']:.3f})")
    return [row]


def train(links: Sequence[WorkerLink], steps: int) -> float:
    """Train so many steps; return the seconds of one: until the slowest rank could begin the next."""
    start = time.monotonic() + LEAD_S
    answers = ask(links, {"steps": steps, "at": start})
    return (max(answer["t"] for answer in answers) - start) / steps


def start(name: str, kind: str, setup: Setup, folder: Path, stack: ExitStack) -> list[WorkerLink]:
    """Start a contender's processes; return the ranks, replica by replica.

    Args:
        name: of the contender.
        kind: hsdp or ft_hsdp.
        setup: what is trained.
        folder: takes the configuration, the run and the logs.
        stack: what ends the processes.
    """
    run = RunDir(folder / "runs" / "bench")
    config = job_config(setup, run.path.parent, network={"host": LOOPBACK})
    file = folder / "config.yaml"
    file.write_text(dump(config))
    if kind == PRODUCT:
        write_job_files(run, config)
        lighthouse = spawn(stack, tied("lighthouse", "--run", str(run.path)), run.lighthouse_log)
        listening(lighthouse, run.lighthouse, run.lighthouse_log, "the lighthouse")
    links, port = [], 0
    for replica in range(setup.replicas):
        if kind == PRODUCT:  # the state agent waits for the ranks
            agent = tied("ft_hsdp.state.agent.server", "--replica", str(replica), "--host", LOOPBACK)
            env = {TOKEN_VARIABLE: worker_token(run.token.read_text().strip())}
            spawn(stack, agent, run.path.parent / f"agent-{replica}.log", env)
        if kind == PRODUCT or replica == 0:  # each replica of ft_hsdp has a store of its own
            port = free_port(LOOPBACK)
        for rank in range(setup.ranks):
            spec = RankSpec(kind, asdict(setup), replica, rank, port, str(file), str(run.path))
            log = folder / f"{name.replace(' ', '-')}-{replica}-{rank}.log"
            worker = f"{name} replica {replica} rank {rank}"
            links.append(spawn_worker(stack, worker, TRAINING, [json.dumps(asdict(spec))], log))
    return links
