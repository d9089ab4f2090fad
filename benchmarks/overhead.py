"""`bench overhead`: what fault tolerance costs while nothing fails.

A step of ft_hsdp is taken beside the same step of PyTorch's HSDP, which survives nothing.

All contenders are alive at once, and each trains a block of steps while the others wait, so that what else runs on
the machine slows all of them. Between two blocks each rank (`training`) stands before its next step.

The CPU time of each thread of the ranks tells where a step's time goes. `--measure profile` draws it, function by
function: runs/profile gets a flame graph for each contender.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from benchmarks.command import measures_of, rounds_of
from benchmarks.flame import draw
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
    WARM_UP,
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
REST_S = 0.05  # for what goes on after a block, as a snapshot
SHOWN = 6  # threads whose CPU time is told
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
PROFILE = Path("runs/profile")


def options(args: Namespace) -> tuple[str, int]:
    """Return what `bench overhead` measures, and how many blocks of each contender it takes."""
    measure = "profile" if args.measure == "profile" else measures_of(args, ("steady",))[0]
    return measure, rounds_of(args, 70 if measure == "steady" else 10)


def goals(result: Row) -> Verdicts:
    """Yield the verdicts on a result of `bench overhead`."""
    for row in result.get("steady", ()):
        for name, times in row["times"].items():
            if name.startswith("ft_hsdp"):
                yield most(f"{name}: a step, times HSDP's", row, STEADY, times["ratio"])


def run(asked: tuple[str, int], stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    measure, rounds = asked
    log = ProgressLog(stream)
    result, started = begin_result("overhead", log)
    result[measure] = steady(rounds, log) if measure == "steady" else profile(rounds, log)
    return finish_result(result, goals(result), log, started)


def profile(rounds: int, log: ProgressLog, setup: Setup = SETUP, folder: Path = PROFILE) -> list[ResultRow]:
    """Draw where the ranks of HSDP, and of ft_hsdp over each transport, spend their CPU time; return the files.

    Each contender is alone on the machine. Raises Retryable where a process fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[ResultRow] = []
    for name, (kind, of) in contenders_of(setup, TRANSPORTS).items():
        with scratch() as (stack, own):
            links = start(name, kind, of, own, stack)
            greet(links)
            train(links, of.steps, Counter())  # the first step is slower
            ask(links, {"stacks": "start"})
            for _ in range(rounds):
                train(links, of.steps, Counter())
            stacks = Counter[str]()
            for answer in ask(links, {"stacks": "stop"}):
                stacks.update(answer["stacks"])
        steps = rounds * of.steps
        file = folder / f"{name.replace(', ', '-').replace(' ', '-')}.svg"
        file.write_text(draw({call: us / 1000 / steps for call, us in stacks.items()}, f"{name}, a step"))
        log.say(f"{name}: {sum(stacks.values()) / 1000 / steps:.0f} ms of CPU time a step: {file}")
        rows.append({"crew": name, "cpu_ms": round(sum(stacks.values()) / 1000 / steps, 1), "file": str(file)})
    return rows


def contenders_of(setup: Setup, transports: tuple[str, ...]) -> dict[str, tuple[str, Setup]]:
    """Return HSDP, and ft_hsdp over each transport: kind and setup, by name."""
    contenders: dict[str, tuple[str, Setup]] = {"hsdp": ("hsdp", setup)}
    for transport in transports:
        sections = {**setup.sections, "ftar": {"timeout_s": PATIENCE_S, "transport": transport}}
        contenders[f"ft_hsdp, {transport}"] = (PRODUCT, replace(setup, sections=sections))
    return contenders


def in_turns(
    contenders: Mapping[str, tuple[str, Setup]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Train all contenders on this machine, all alive, one block of one of them at a time (ABAB).

    Args:
        contenders: kind and setup, by name.
        rounds: how many blocks of each count.

    Returns:
        Seconds of a step, of each of so many blocks, by contender. And milliseconds of CPU time of a step, of all
        ranks together, by contender and thread.

    Raises:
        Retryable: A process fails.
    """
    with scratch() as (stack, folder):
        samples: dict[str, Callable[[], float]] = {}
        spent: dict[str, Counter[str]] = {}
        for number, (name, (kind, setup)) in enumerate(contenders.items()):
            own = folder / str(number)
            own.mkdir()
            links = start(name, kind, setup, own, stack)
            greet(links)  # one after the other: two dozen imports at once take too long
            spent[name] = Counter()
            samples[name] = partial(train, links, setup.steps, spent[name])
        took = interleave(samples, rounds)
        steps = {name: (rounds + WARM_UP) * setup.steps for name, (_, setup) in contenders.items()}
        cpu = {
            name: {thread: us / 1000 / steps[name] for thread, us in threads.most_common()}
            for name, threads in spent.items()
        }
        return took, cpu


def steady(
    rounds: int,
    log: ProgressLog,
    setup: Setup = SETUP,
    transports: tuple[str, ...] = TRANSPORTS,
) -> list[ResultRow]:
    """Return a row: steps of HSDP, of a second HSDP (the method's own noise), of ft_hsdp over each transport.

    Between machines ft_hsdp uses TCP, as HSDP's gloo always does. Raises Retryable where a process fails.
    """
    contenders = contenders_of(setup, transports) | {"hsdp again": ("hsdp", setup)}
    took, cpu = in_turns(contenders, rounds)
    total = {name: sum(threads.values()) for name, threads in cpu.items()}
    row: ResultRow = {
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "rounds": rounds,
        "crews": {name: spread(seconds) for name, seconds in took.items()},
        "times": {name: ratio_interval(took[name], took["hsdp"]) for name in took if name != "hsdp"},
        "cpu_ms": {
            name: {thread: round(ms, 2) for thread, ms in threads.items()} for name, threads in cpu.items()
        },
        "cpu_times": {name: round(ms / total["hsdp"], 3) for name, ms in total.items()},
    }
    for name, threads in cpu.items():
        shown = ", ".join(f"{thread} {ms:.0f}" for thread, ms in [*threads.items()][:SHOWN])
        log.say(f"{name}: {total[name]:.0f} ms of CPU time a step, {row['cpu_times'][name]} times HSDP's: {shown}")
    for name, found in row["times"].items():
        log.say(f"{name}: {found['ratio']:.3f} times HSDP's step ({found['low']:.3f} to {found['high']:.3f})")
    return [row]


def train(links: Sequence[WorkerLink], steps: int, spent: Counter[str]) -> float:
    """Train so many steps; return the seconds of one: until the slowest rank could begin the next.

    ``spent`` gets the CPU time of each thread in microseconds.
    """
    spent.subtract(_cpu_time(links))
    start = time.monotonic() + LEAD_S
    answers = ask(links, {"steps": steps, "at": start})
    time.sleep(REST_S)
    spent.update(_cpu_time(links))
    return (max(answer["t"] for answer in answers) - start) / steps


def _cpu_time(links: Sequence[WorkerLink]) -> Counter[str]:
    """Return the CPU time that the ranks have taken so far in microseconds, by name of the thread."""
    found = Counter[str]()
    for answer in ask(links, {"cpu": True}):
        found.update(answer["cpu"])
    return found


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
