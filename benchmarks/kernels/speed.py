"""Measures the kernels' bandwidth, alone and beside matmuls on the same device."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.kernels import stepped
from benchmarks.kernels.checks import watchdog
from benchmarks.kernels.ring import KernelRingMember, RingMemoryLayout
from ft_hsdp.core.ring import OperationKind
from ftar_kernels.flags import Command, host_buffer
from ftar_kernels.plane import StagedPlane

MIB = 2**20
REPEAT = 25
CHUNK = 8 * MIB


def timed(calls: dict[str, Callable[[], object]], repeat: int = REPEAT) -> dict[str, float]:
    """Return the median seconds of each call on the device; the calls take turns."""
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def bandwidth(device: torch.device) -> dict[str, Any]:
    """Measure the GB/s of chunks (bytes of one buffer over time), beside torch's own kernels.

    It varies the number of programs and of staged loads.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        n = 64 * MIB // dtype.itemsize
        a, b, c, d = (torch.randn(n, device=device).to(dtype) for _ in range(4))
        host = host_buffer(64 * MIB, device).view(dtype)
        calls: dict[str, Callable[[], object]] = {
            "torch add": partial(torch.add, a, b, out=c),
            "torch copy": partial(c.copy_, a),
        }
        for programs in (1, 2, 4, 8, 16, sms):
            for stages in (1, 3):
                name = f"{programs} programs, {stages} stages"
                calls[f"reduce to 2, {name}"] = partial(
                    stepped.reduce_copy, a, b, c, d, programs=programs, stages=stages
                )
                calls[f"copy, {name}"] = partial(stepped.reduce_copy, a, None, c, programs=programs, stages=stages)
        calls["pinned to device, 2 programs"] = partial(stepped.reduce_copy, host, None, c)
        calls["pinned reduce to pinned and device, 2 programs"] = partial(stepped.reduce_copy, host, b, host, d)
        for name, seconds in timed(calls).items():
            rows.append({"what": name, "dtype": str(dtype), "gb_s": a.nbytes / seconds / 1e9})
    return {"ok": True, "sms": sms, "rows": rows}


class Load:
    """A plane that a thread keeps in an all-reduce: idle, or busy with storing reductions of 8 MiB chunks."""

    def __init__(self, device: torch.device, programs: int, busy: bool) -> None:
        buffers = [torch.empty(CHUNK + 64, dtype=torch.uint8, device=device) for _ in range(2)]
        self.plane = StagedPlane(device, *buffers, programs=programs, silence_s=60)
        self.plane.warm_up((torch.float32,))
        self._local = torch.randn(CHUNK // 4, device=device)
        self._out = torch.empty_like(self._local)
        self._busy = busy
        self._end = threading.Event()
        self.chunks = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Load:
        torch.cuda.synchronize()
        self._thread.start()
        time.sleep(0.05)
        return self

    def _run(self) -> None:
        job = self.plane.open(self._local, self._out, 10**9)
        ahead = 0
        while not self._end.is_set():
            while self._busy and ahead < 4:
                job.post(Command(OperationKind.REDUCE_STORE_SEND, 0, CHUNK // 4, 0, 0))
                ahead += 1
            done = len(job.completed())
            ahead -= done
            self.chunks += done
            if not done:
                time.sleep(2e-5)
        job.close(failed=True)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.plane.close()


def overlap(device: torch.device, buckets: int = 8, elements: int = 8 * MIB) -> dict[str, Any]:
    """Measure a backward of `buckets` matmuls, each of which hands a bucket to a ring of two threads.

    Exposed is what of the all-reduces is left when the last matmul is done.
    """
    counts = (2, 4) if device.type == "cuda" else (1,)
    rows = [_overlap(device, buckets, elements, programs) for programs in counts]
    return {"ok": all(row["ok"] for row in rows), "buckets": buckets, "mib": 4 * elements / MIB, "rows": rows}


def _overlap(device: torch.device, buckets: int, elements: int, programs: int) -> dict[str, Any]:
    cuda = device.type == "cuda"
    a = torch.randn(8192 if cuda else 64, 8192 if cuda else 64, device=device)
    layout = RingMemoryLayout(2, min(CHUNK, 4 * elements), 4)
    memory = host_buffer(layout.nbytes, device)
    team = [
        KernelRingMember(
            memory, layout, i, device, 4 * elements, stepped.kind_of(device), programs=programs if cuda else 1
        )
        for i in (0, 1)
    ]
    for member in team:
        member.plane.warm_up((torch.float32,))
    gradients = [torch.randn(elements, device=device) for _ in team]
    sums = [torch.empty(elements, device=device) for _ in team]
    works: list[Future[None]] = []

    def backward(threads: Sequence[ThreadPoolExecutor]) -> float:
        begin = time.perf_counter()
        for _ in range(buckets):
            torch.matmul(a, a)
            after = torch.cuda.current_stream().record_event() if cuda else None
            for thread, member, own, out in zip(threads, team, gradients, sums, strict=False):
                works.append(thread.submit(member.all_reduce, own, out, after))
        if cuda:
            torch.cuda.current_stream().synchronize()  # not the device: a kernel may wait there
        return time.perf_counter() - begin

    alone, beside, exposed = [], [], []
    planes = [member.plane for member in team]
    with watchdog(60, *planes), ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        for _ in range(5):
            alone.append(backward(()))
            beside.append(backward((one, two)))
            begin = time.perf_counter()
            for work in works:
                work.result()
            works.clear()
            exposed.append(time.perf_counter() - begin)
    ok = torch.equal(sums[0], sums[1]) and torch.equal(sums[0], gradients[0] + gradients[1])
    for member in team:
        member.close()
    return {
        "ok": ok, "programs": programs, "backward_ms": 1e3 * statistics.median(alone),
        "slow_down": statistics.median(beside) / statistics.median(alone),
        "exposed_ms": 1e3 * statistics.median(exposed),
    }  # fmt: skip


def matmul(device: torch.device, n: int = 8192, inner: int = 10) -> dict[str, Any]:
    """Measure how much a bf16 matmul slows down beside a plane that waits or works.

    The matmul alone and beside the plane take turns.
    """
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        for _ in range(inner):
            torch.matmul(a, b, out=out)

    rows = []
    for programs, busy in ((2, False), (2, True), (4, True)):
        alone, beside, gb_s = [], [], []
        for _ in range(5):
            alone.append(timed({"alone": multiply}, 3)["alone"])
            with Load(device, programs, busy) as load, watchdog(45, load.plane):
                before, begin = load.chunks, time.monotonic()
                beside.append(timed({"beside": multiply}, 3)["beside"])
                gb_s.append((load.chunks - before) * CHUNK / (time.monotonic() - begin) / 1e9)
        slow = statistics.median(beside) / statistics.median(alone)
        rows.append({
            "programs": programs, "busy": busy, "slow_down": slow, "chunks_gb_s":
            statistics.median(gb_s), "tflops_alone": 2 * n**3 * inner / statistics.median(alone) / 1e12,
        })  # fmt: skip
    return {"ok": True, "rows": rows}
