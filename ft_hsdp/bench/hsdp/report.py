"""From blocks of steps to what the exchange costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_hsdp.bench.hsdp.scene import Scene
from ft_hsdp.bench.plan import Row
from ft_hsdp.bench.spread import milliseconds, ratio, spread


@dataclass(frozen=True, slots=True)
class Block:
    """What a step took: seconds, bytes sent by the replica that sent most, CPU seconds of all ranks."""

    seconds: float
    sent: float
    cpu_s: float


def report(
    scene: Scene, blocks: Mapping[str, Sequence[Block]], commits: Sequence[Sequence[Mapping[str, Any]]]
) -> Row:
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


def _crew(blocks: Sequence[Block]) -> Row:
    return {
        "step": spread([block.seconds for block in blocks]),
        "cpu_ms_per_step": milliseconds(statistics.median(block.cpu_s for block in blocks)),
        "link_bytes_per_step": round(statistics.median(block.sent for block in blocks)),
    }


def _median(rows: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> float:
    return statistics.median(value(row) for row in rows)
