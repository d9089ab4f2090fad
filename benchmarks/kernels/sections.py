"""The parts of the bench by name, with their limits. Each runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import blocking, checks, ladder, limits, nccl, processes, rates, speed
from benchmarks.kernels.compile_check import figures, launch_problems
from ftar_kernels.handshake import uninterpretable

ROOT = Path(__file__).parents[2]
MIB = 2**20
CPU = torch.device("cpu")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _all_ok(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ok": all(row["ok"] for row in rows), "rows": rows}


def compiled() -> dict[str, Any]:
    """Run the compile check."""
    rows = figures()
    problems = [text for row in rows for text in row.problems()] + launch_problems()
    best = {row.dtype: row.registers for row in rows if row.name == "persistent_kernel" and row.stages == 1}
    return {"ok": not problems, "kernels": len(rows), "problems": problems, "persistent_registers": best}


def interpreted() -> dict[str, Any]:
    """Check what can be checked without a GPU: small sizes, one program."""
    if why := uninterpretable():
        return {"ok": True, "skipped": why}
    rows = [checks.kernels(CPU), checks.commands(CPU, repeat=1), checks.ring(CPU, 3, 5003, 1024, 2, relay=1)]
    return _all_ok([*rows, ladder.Ladder(CPU).run(), limits.run(CPU, 20), speed.overlap(CPU, 2, 3000)])


def interpreted_processes() -> dict[str, Any]:
    """Check a ring of two processes without a GPU, and one of which a member is killed."""
    if why := uninterpretable():
        return {"ok": True, "skipped": why}
    return _all_ok([processes.ring("cpu", 2, 1501, 1024, 2, 2), processes.kill("cpu", 2, 1501, 1024, 2)])


def correct() -> dict[str, Any]:
    """Check kernels and commands on the GPU."""
    device = _device()
    commands = [checks.commands(device, 3000, 4), checks.commands(device, 300_000, 2)]
    return _all_ok([checks.kernels(device), *commands, checks.summaries(device)])


def threads() -> dict[str, Any]:
    """Check rings of 2 and 4 threads, each with a stream of its own."""
    rows = []
    for members in (2, 4):
        rows.append(checks.ring(_device(), members, 1_000_003, 256 * 1024, 4, torch.bfloat16, 2, 1))
        rows.append(checks.ring(_device(), members, 16 * MIB, 8 * MIB, 4, torch.float32, 10))
    return _all_ok(rows)


def staged() -> dict[str, Any]:
    """Check rings of 2 and 4 processes, then with one of them killed."""
    rows = []
    for members in (2, 4):
        rows.append(processes.ring("cuda", members, MIB + 3, 256 * 1024, 4, 5))
        rows.append(processes.kill("cuda", members, MIB + 3, 256 * 1024, 4))
    return _all_ok(rows)


def climb() -> dict[str, Any]:
    """Try one mechanism after the other; the first rung that fails names the fault."""
    return ladder.Ladder(_device()).run()


def blocked() -> dict[str, Any]:
    """Find out which calls of another thread wait for a kernel that spins, and that the engine never does."""
    return blocking.run(_device())


def ordered() -> dict[str, Any]:
    """Show what happens to sums that are cleared after the gradient's event was recorded."""
    return ladder.order(_device())


def rated() -> dict[str, Any]:
    """Measure copies between device and host, and a host's norm and hash."""
    return rates.run(_device())


def flags() -> dict[str, Any]:
    """Measure round trip, abort and deadline on the GPU."""
    return limits.run(_device())


def bandwidth() -> dict[str, Any]:
    """Measure how fast the kernels move bytes on the GPU."""
    return speed.bandwidth(_device())


def matmul() -> dict[str, Any]:
    """Measure a matmul beside a plane."""
    return speed.matmul(_device())


def overlapped() -> dict[str, Any]:
    """Measure what of a ring of two threads is left after the last bucket, and how much a backward slows down."""
    return speed.overlap(_device())


def step() -> dict[str, Any]:
    """Measure a training step of plain FSDP2 beside ours, at 0.54e9 parameters; profile one."""
    return _step(4)


def large_step() -> dict[str, Any]:
    """Measure the same at 0.94e9 parameters."""
    return _step(7)


def _step(layers: int) -> dict[str, Any]:
    trace = Path(os.environ["BENCH_OUT"]) / f"step-{layers}.trace.json.gz"
    command = [sys.executable, "-m", "benchmarks.kernels.gpu_step", "--layers", str(layers), "--trace", str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"ok": False, "error": done.stderr[-800:]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def job() -> dict[str, Any]:
    """Train configs/gpu.yaml with its kill: both replicas must end with the same digest."""
    out = Path(os.environ["BENCH_OUT"])
    command = [sys.executable, "launcher.py", "up", "configs/gpu.yaml", f"--job.runs_dir={out / 'runs'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (out / "job.txt").write_text(done.stdout + done.stderr)
    run = out / "runs" / "gpu"
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    last = [line for line in done.stdout.splitlines() if line.startswith("step ")][-2:]
    return {"ok": done.returncode == 0, "code": done.returncode, "last": last, "summary": summary}


@dataclass(frozen=True, slots=True)
class BenchSection:
    """A part of the bench, which runs in a process of its own."""

    limit_s: float
    work: Callable[[], dict[str, Any]]
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = True  # whether it needs one
    goal: str = ""  # for its figures; a figure that misses it is no failure

    @property
    def what(self) -> str:
        """The first line of what it does."""
        return (self.work.__doc__ or "").splitlines()[0]


RANK = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # as `train.device` sets it
EAGER = {**RANK, "CUDA_MODULE_LOADING": "EAGER"}
INTERPRET = {"TRITON_INTERPRET": "1"}

# In the order of their value: a device may be at hand for minutes only.
SECTIONS: dict[str, BenchSection] = {
    "facts": BenchSection(100, rates.facts),
    "ladder": BenchSection(60, climb, RANK, goal="every rung holds"),
    "blocking": BenchSection(60, blocked, RANK, goal="the engine's slowest look below 10 ms, in every row"),
    "order": BenchSection(20, ordered, RANK, goal="0 wrong with the event after the clearing"),
    "correct": BenchSection(90, correct, RANK),
    "job": BenchSection(120, job),
    "threads": BenchSection(60, threads, RANK),
    "step": BenchSection(150, step, goal="ours at most 1.02 of plain FSDP2"),
    "overlap": BenchSection(60, overlapped, RANK, goal="exposed at most 5 % of the backward, slow-down 1.03"),
    "rates": BenchSection(60, rated, RANK, goal="2 programs stage 30 GB/s"),
    "flags": BenchSection(40, flags, RANK, goal="round trip p50 below 200 us, an abort below 1 ms"),
    "blocking-eager": BenchSection(60, blocked, EAGER),
    "matmul": BenchSection(60, matmul, RANK, goal="slow-down at most 1.03 with 2 programs"),
    "step-large": BenchSection(150, large_step, goal="ours at most 1.02 of plain FSDP2"),
    "staged": BenchSection(90, staged, RANK),
    "bandwidth": BenchSection(90, bandwidth, RANK),
    "nccl": BenchSection(60, nccl.run, RANK),
    "compiled": BenchSection(420, compiled, gpu=False),
    "interpreted": BenchSection(420, interpreted, INTERPRET, gpu=False),
    "processes": BenchSection(420, interpreted_processes, INTERPRET, gpu=False),
}
