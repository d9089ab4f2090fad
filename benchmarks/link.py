"""`bench link`: what the exchange between replicas costs a training step, on a link like that between machines.

Three contenders train the same model in turn, block after block, on one network: replicas that exchange nothing,
PyTorch's own HSDP, and ft_hsdp. The first one is the baseline; what the others take longer is the cost of their
exchange.
"""

from __future__ import annotations

import json
import signal
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import psutil

from benchmarks.namespaces import Network, unfit
from ft_hsdp.bench.command import rounds_of
from ft_hsdp.bench.jobs import PATIENCE_S, TRAIN, TRANSFORMER, Setup
from ft_hsdp.bench.overhead import start, start_lighthouse, train
from ft_hsdp.bench.processes import WorkerLink, greet, scratch
from ft_hsdp.bench.results import (
    WARM_UP,
    ProgressLog,
    ResultRow,
    Verdicts,
    begin_result,
    finish_result,
    interleave,
    milliseconds,
    most,
    ratio,
    spread,
)
from ft_hsdp.launch.run.directory import RunDir

KINDS = ("alone", "hsdp", "ft_hsdp")
LINK_COST = 0.6  # the goal, of the cost of HSDP's exchange


JOB = Setup(
    replicas=3,
    ranks=2,
    model=TRANSFORMER,
    sections={
        "train": {**TRAIN, "micro_batch": 2, "seq_len": 128},
        "model": {"dim": 320, "layers": 8, "heads": 5},
        "ftar": {"timeout_s": PATIENCE_S},
    },
)
"""A transformer of 10 million parameters, 256 tokens a rank and step.

A rank's gradient is 20 MB, and its exchange takes a link of 1 Gbit about as long as backward takes 2 cores.
"""


@dataclass(frozen=True, slots=True)
class LinkSetup:
    """What is trained, on which links, and how often."""

    job: Setup = JOB
    rounds: int = 20  # blocks of steps of each contender
    rate: str = "1gbit"  # of each replica's link, as tc says it
    bits_per_s: float = 1e9  # the same
    congestion: str = ""  # control of all TCP in the namespaces, "" for the machine's default


def options(args: Namespace) -> LinkSetup:
    """Return what `bench link` is to do."""
    return LinkSetup(rounds=rounds_of(args, LinkSetup().rounds))


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench link`."""
    for row in result["link"]:
        if row["times_cost"] is not None:
            yield most("exchange on a link, times HSDP's cost", row, LINK_COST, row["times_cost"])


def run(setup: LinkSetup, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``. Raises Retryable where a process fails."""
    log = ProgressLog(stream)
    result, started = begin_result("link", log)
    result["link"] = measure(setup, log)
    return finish_result(result, goals(result), log, started)


@dataclass(frozen=True, slots=True)
class StepBlock:
    """What a step of a block took."""

    seconds: float
    sent: float  # bytes of the replica that sent most
    cpu_s: float  # of all ranks


def report(
    setup: LinkSetup, blocks: Mapping[str, Sequence[StepBlock]], commits: Sequence[Sequence[Mapping[str, Any]]]
) -> ResultRow:
    """Return the row: the cost is the median step beyond that of replicas that exchange nothing.

    Args:
        setup: what was trained.
        blocks: of each contender.
        commits: what each replica of ft_hsdp logged of each step.
    """
    medians = {name: statistics.median(block.seconds for block in each) for name, each in blocks.items()}
    costs = {name: medians[name] - medians["alone"] for name in ("hsdp", "ft_hsdp")}
    rows = [row for replica in commits for row in replica]
    exchange_s = _median(rows, lambda row: row["ftar_s"])
    gradient = 2 * (setup.job.replicas - 1) / setup.job.replicas
    bytes_sent = _median(rows, lambda row: row["ftar_bytes"]) * setup.job.ranks
    return {
        "members": setup.job.replicas,
        "ranks": setup.job.ranks,
        "rate": setup.rate,
        "congestion": setup.congestion or "the machine's default",
        "ftar": dict(setup.job.sections.get("ftar", {})),
        "rounds": setup.rounds,
        "steps_per_block": setup.job.steps,
        "gradient_bytes_per_rank": round(bytes_sent / setup.job.ranks / gradient),
        "least_exchange_ms": milliseconds(8 * bytes_sent / setup.bits_per_s),
        "crews": {name: _figures(each) for name, each in blocks.items()},
        "cost_ms": {name: milliseconds(cost) for name, cost in costs.items()},
        "times_cost": ratio(costs["ft_hsdp"], costs["hsdp"]) if costs["hsdp"] > 0 else None,
        "ft_hsdp": {
            "exchange_ms": milliseconds(exchange_s),
            "exposed_ms": milliseconds(_median(rows, lambda row: row["waits"]["ftar"])),
            "commit_ms": milliseconds(_median(rows, lambda row: row["waits"]["commit"])),
            "mbit_per_s": round(8 * bytes_sent / exchange_s / 1e6, 1),
        },
    }


def _figures(blocks: Sequence[StepBlock]) -> ResultRow:
    return {
        "step": spread([block.seconds for block in blocks]),
        "cpu_ms_per_step": milliseconds(statistics.median(block.cpu_s for block in blocks)),
        "link_bytes_per_step": round(statistics.median(block.sent for block in blocks)),
    }


def _median(rows: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> float:
    return statistics.median(value(row) for row in rows)


def measure(setup: LinkSetup, log: ProgressLog) -> list[ResultRow]:
    """Return one row; none, and a note, where there can be no such network.

    Raises:
        Retryable: A process fails.
    """
    if why := unfit():
        log.note(f"link is left out: {why}")
        return []
    blocks: dict[str, list[StepBlock]] = {name: [] for name in KINDS}
    with sigterm_unwinds(), scratch() as (stack, folder):
        network = stack.enter_context(Network(setup.job.replicas, setup.rate, setup.congestion))
        run = start_lighthouse(network, setup.job, folder, stack)
        ranks = {name: start(name, name, n, network, setup.job, folder, stack) for n, name in enumerate(KINDS)}
        for each in ranks.values():
            greet(each)
        log.say(
            f"{setup.job.replicas} replicas of {setup.job.ranks} ranks, links of {setup.rate}: {', '.join(KINDS)}"
        )
        turns = {
            name: partial(_block, each, network, setup.job.steps, blocks[name]) for name, each in ranks.items()
        }
        interleave(turns, setup.rounds)
        commits = [_commits(run, replica)[WARM_UP * setup.job.steps :] for replica in range(setup.job.replicas)]
    counted = {name: each[WARM_UP:] for name, each in blocks.items()}
    return [report(setup, counted, commits)]


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Have SIGTERM unwind as Ctrl-C does: a namespace would outlive us."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _block(ranks: Sequence[WorkerLink], network: Network, steps: int, blocks: list[StepBlock]) -> float:
    """Train a block of steps; return the seconds of a step."""
    cpu_s, sent = _cpu_s(ranks), network.sent()
    seconds = train(ranks, steps)
    went = [after - before for after, before in zip(network.sent(), sent, strict=True)]
    blocks.append(StepBlock(seconds, max(went) / steps, (_cpu_s(ranks) - cpu_s) / steps))
    return seconds


def _cpu_s(ranks: Sequence[WorkerLink]) -> float:
    """Return the CPU time of all processes so far, the kernel's for them included."""
    times = [psutil.Process(link.process.pid).cpu_times() for link in ranks]
    return sum(t.user + t.system for t in times)


def _commits(run: RunDir, replica: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.commits(replica).read_text().splitlines()]
