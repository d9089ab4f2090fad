"""From blocks of steps to what the exchange costs.

Three crews train in turn on one network, block after block.
"""

from __future__ import annotations

import json
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ft_hsdp.bench.hsdp import processes as crews
from ft_hsdp.bench.hsdp.network import Network, unfit
from ft_hsdp.bench.hsdp.processes import Crew
from ft_hsdp.bench.hsdp.scene import HsdpScene
from ft_hsdp.bench.options import ProgressLog, ResultRow
from ft_hsdp.bench.results import WARM_UP, interleave, milliseconds, ratio, spread
from ft_hsdp.launch.run.directory import RunDir


@dataclass(frozen=True, slots=True)
class StepBlock:
    """What a step took: seconds, bytes sent by the replica that sent most, CPU seconds of all ranks."""

    seconds: float
    sent: float
    cpu_s: float


def report(
    scene: HsdpScene, blocks: Mapping[str, Sequence[StepBlock]], commits: Sequence[Sequence[Mapping[str, Any]]]
) -> ResultRow:
    """The result. `blocks` of each crew; `commits`: of each replica of ft_hsdp, what it wrote down of each step.

    cost: the median step beyond that of replicas that exchange nothing; times_cost: ft_hsdp's over HSDP's.
    """
    medians = {name: statistics.median(block.seconds for block in each) for name, each in blocks.items()}
    costs = {name: medians[name] - medians["alone"] for name in ("hsdp", "ft_hsdp")}
    rows = [row for replica in commits for row in replica]
    exchange_s = _median(rows, lambda row: row["ftar_s"])
    gradient = 2 * (scene.replicas - 1) / scene.replicas
    bytes_sent = _median(rows, lambda row: row["ftar_bytes"]) * scene.ranks
    return {
        "members": scene.replicas,
        "ranks": scene.ranks,
        "rate": scene.rate,
        "congestion": scene.congestion or "the machine's default",
        "ftar": dict(scene.sections.get("ftar", {})),
        "rounds": scene.rounds,
        "steps_per_block": scene.steps,
        "gradient_bytes_per_rank": round(bytes_sent / scene.ranks / gradient),
        "least_exchange_ms": milliseconds(8 * bytes_sent / scene.bits_per_s),
        "crews": {name: _crew(each) for name, each in blocks.items()},
        "cost_ms": {name: milliseconds(cost) for name, cost in costs.items()},
        "times_cost": ratio(costs["ft_hsdp"], costs["hsdp"]) if costs["hsdp"] > 0 else None,
        "ft_hsdp": {
            "exchange_ms": milliseconds(exchange_s),
            "exposed_ms": milliseconds(_median(rows, lambda row: row["waits"]["ftar"])),
            "commit_ms": milliseconds(_median(rows, lambda row: row["waits"]["commit"])),
            "mbit_per_s": round(8 * bytes_sent / exchange_s / 1e6, 1),
        },
    }


def _crew(blocks: Sequence[StepBlock]) -> ResultRow:
    return {
        "step": spread([block.seconds for block in blocks]),
        "cpu_ms_per_step": milliseconds(statistics.median(block.cpu_s for block in blocks)),
        "link_bytes_per_step": round(statistics.median(block.sent for block in blocks)),
    }


def _median(rows: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> float:
    return statistics.median(value(row) for row in rows)


CREWS = ("alone", "hsdp", "ft_hsdp")


def measure(scene: HsdpScene, log: ProgressLog) -> list[ResultRow]:
    """One row, see `report`; none, and a note, where there can be no such network.

    Raises Retryable where a process fails.
    """
    if why := unfit():
        log.note(f"link is left out: {why}")
        return []
    blocks: dict[str, list[StepBlock]] = {name: [] for name in CREWS}
    with _unwinding(), ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-hsdp-bench-")))
        network = stack.enter_context(Network(scene.replicas, scene.rate, scene.congestion))
        run = crews.lighthouse(network, scene, folder, stack)
        team = [crews.start(name, name, n, network, scene, folder, stack) for n, name in enumerate(CREWS)]
        for crew in team:
            crew.ready()
        log.say(f"{scene.replicas} replicas of {scene.ranks} ranks, links of {scene.rate}: {', '.join(CREWS)}")
        turns = {crew.name: partial(_block, crew, network, scene.steps, blocks[crew.name]) for crew in team}
        interleave(turns, scene.rounds)
        commits = [_commits(run, replica)[WARM_UP * scene.steps :] for replica in range(scene.replicas)]
    counted = {name: each[WARM_UP:] for name, each in blocks.items()}
    return [report(scene, counted, commits)]


@contextmanager
def _unwinding() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does: a namespace would outlive us."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _block(crew: Crew, network: Network, steps: int, blocks: list[StepBlock]) -> float:
    """Train a block of steps; seconds of a step."""
    cpu_s, sent = crew.cpu_s(), network.sent()
    seconds = crew.train(steps)
    went = [after - before for after, before in zip(network.sent(), sent, strict=True)]
    blocks.append(StepBlock(seconds, max(went) / steps, (crew.cpu_s() - cpu_s) / steps))
    return seconds


def _commits(run: RunDir, replica: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.commits(replica).read_text().splitlines()]
