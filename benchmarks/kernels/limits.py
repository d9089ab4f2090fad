"""Measures how quickly a plane answers, how quickly it ends after an abort, and how exact its deadline is."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.kernels.checks import drain, empty, programs, watchdog
from ft_hsdp.core.ring import OperationKind
from ftar_kernels.flags import Command, Status, host_buffer
from ftar_kernels.plane import StagedPlane


def _plane(device: torch.device) -> StagedPlane:
    buffers = [host_buffer(4096, device) for _ in range(2)]
    plane = StagedPlane(device, *buffers, programs=programs(), depth=16, silence_s=20)
    plane.warm_up((torch.float32,))
    return plane


def _summary(times: list[float]) -> dict[str, float]:
    return {"p50_us": 1e6 * statistics.median(times), "max_us": 1e6 * max(times)}


def round_trip(device: torch.device, repeat: int) -> dict[str, float]:
    """Measure the time from posting an empty command until the host knows that it is finished."""
    plane = _plane(device)
    tensor = empty(16, torch.float32, device)
    times = []
    with watchdog(30, plane):
        job = plane.open(tensor, tensor, repeat)
        for _ in range(repeat):
            begin = time.perf_counter()
            job.post(Command(OperationKind.STORE, 0, 0))
            while not job.completed():
                pass
            times.append(time.perf_counter() - begin)
        job.close(failed=False)
    plane.close()
    return _summary(times)


def abort(device: torch.device, repeat: int) -> dict[str, float]:
    """Measure the time from an abort to the end of the kernel that waited."""
    plane = _plane(device)
    tensor = empty(16, torch.float32, device)
    times = []
    for _ in range(repeat):
        job = plane.open(tensor, tensor, 100)
        job.post(Command(OperationKind.STORE, 0, 16))
        drain(job, 1)
        begin = time.perf_counter()
        plane.abort()
        job.close(failed=True)
        times.append(time.perf_counter() - begin)
    plane.close()
    return _summary(times)


def deadline(device: torch.device, timeout_s: float) -> dict[str, float]:
    """Measure how long a kernel waits while the engine neither posts nor asks.

    Raises:
        RuntimeError: the kernel ended for another reason.
    """
    plane = _plane(device)
    plane.silence_ns = int(timeout_s * 1e9)
    tensor = empty(16, torch.float32, device)
    begin = time.perf_counter()
    job = plane.open(tensor, tensor, 1)
    with watchdog(timeout_s + 10, plane):
        while plane.page.status(0) in (Status.QUEUED, Status.RUNNING):
            time.sleep(2e-5)
    waited = time.perf_counter() - begin
    status = plane.page.status(0)
    job.close(failed=True)
    plane.close()
    if status is not Status.EXPIRED:
        raise RuntimeError(f"the kernel ended as {status.name} instead of by its deadline")
    return {"asked_s": timeout_s, "waited_s": waited}


def run(device: torch.device, repeat: int = 200) -> dict[str, Any]:
    """Run all three measurements."""
    return {
        "ok": True,
        "round_trip": round_trip(device, repeat),
        "abort": abort(device, repeat // 4),
        "deadline": [deadline(device, seconds) for seconds in (0.05, 0.5)],
    }
