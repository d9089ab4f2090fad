"""The parts of the bench by name. Each runs in a process of its own, so that none disturbs another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ftar_kernels.bench import checks, limits, nccl, processes, speed
from ftar_kernels.compile_check import figures

MIB = 2**20
CPU = torch.device("cpu")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _all_ok(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ok": all(row["ok"] for row in rows), "rows": rows}


def compiled() -> dict[str, Any]:
    """Run the compile check."""
    rows = figures()
    problems = [text for row in rows for text in row.problems()]
    best = {row.dtype: row.registers for row in rows if row.name == "persistent_kernel" and row.stages == 1}
    return {"ok": not problems, "kernels": len(rows), "problems": problems, "persistent_registers": best}


def interpreted() -> dict[str, Any]:
    """Check what can be checked without a GPU: small sizes, one program."""
    rows = [checks.kernels(CPU), *(checks.commands(CPU, via, repeat=1) for via in checks.PLANES)]
    rows.append(checks.ring(CPU, "streamops", 3, 5003, 1024, 2, relay=1))
    return _all_ok([*rows, limits.run(CPU, 20)])


def interpreted_processes() -> dict[str, Any]:
    """Check a ring of two processes without a GPU, and one of which a member is killed."""
    ring = processes.ring("cpu", "persistent", 2, 1501, 1024, 2, 2)
    return _all_ok([ring, processes.kill("cpu", "streamops", 2, 1501, 1024, 2)])


def correct() -> dict[str, Any]:
    """Check kernels and commands on the GPU."""
    device = _device()
    rows = [checks.kernels(device)]
    for via in checks.PLANES:
        rows += [checks.commands(device, via, 3000, 4), checks.commands(device, via, 300_000, 2)]
    return _all_ok(rows)


def threads() -> dict[str, Any]:
    """Check rings of 2 and 4 threads, each with a stream of its own."""
    rows = []
    for via in checks.PLANES:
        for members in (2, 4):
            rows.append(checks.ring(_device(), via, members, 1_000_003, 256 * 1024, 4, torch.bfloat16, 2, 1))
            rows.append(checks.ring(_device(), via, members, 16 * MIB, 8 * MIB, 4, torch.float32, 10))
    return _all_ok(rows)


def staged() -> dict[str, Any]:
    """Check rings of 2 and 4 processes, then with one of them killed."""
    rows = []
    for via in checks.PLANES:
        for members in (2, 4):
            rows.append(processes.ring("cuda", via, members, MIB + 3, 256 * 1024, 4, 5))
            rows.append(processes.kill("cuda", via, members, MIB + 3, 256 * 1024, 4))
    return _all_ok(rows)


def flags() -> dict[str, Any]:
    """Measure round trip, abort and deadline on the GPU."""
    return limits.run(_device())


def bandwidth() -> dict[str, Any]:
    """Measure how fast the kernels move bytes on the GPU."""
    return speed.bandwidth(_device())


def matmul() -> dict[str, Any]:
    """Measure a matmul beside a plane."""
    return speed.matmul(_device())


ANYWHERE: dict[str, Callable[[], dict[str, Any]]] = {
    "compiled": compiled,
    "interpreted": interpreted,
    "processes": interpreted_processes,
}
INTERPRETED = ("interpreted", "processes")
ON_GPU: dict[str, Callable[[], dict[str, Any]]] = {
    "correct": correct,
    "flags": flags,
    "bandwidth": bandwidth,
    "threads": threads,
    "staged": staged,
    "matmul": matmul,
    "nccl": nccl.run,
}
