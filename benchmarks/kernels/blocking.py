"""Which calls of another thread wait for a kernel that spins, and whether the engine has to wait, too."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.ladder import plane_of
from ft_hsdp.core.ring import OperationKind
from ftar_kernels.flags import Command

N = 1 << 20
PAGE = 4096
ALONE_S = 0.6  # a call that takes longer waits for the kernel
GIVE_UP_S = 8.0  # a call that takes longer after the abort hangs

FRESH = """
import triton
import triton.language as tl

@triton.jit
def kernel(p, n, C: tl.constexpr):
    i = tl.arange(0, 128)
    tl.store(p + i, tl.load(p + i) + C, mask=i < n)
"""


def _fresh_kernel(x: Tensor) -> None:
    """Launch a Triton kernel that this process has not loaded."""
    path = Path(tempfile.mkdtemp()) / "fresh.py"
    path.write_text(FRESH)
    spec = importlib.util.spec_from_file_location("fresh", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.kernel[(1,)](x, 64, os.getpid() % 1000)


def _calls(x: Tensor, other: torch.cuda.Stream) -> dict[str, Callable[[], object]]:
    """Return the calls by name; those that need a stream use `other`."""
    device, runtime = x.device, torch.cuda.cudart()
    event, pinned, pageable = torch.cuda.Event(), torch.empty(N, pin_memory=True), torch.empty(N)
    event.record(other)
    big = [torch.empty(256 << 20, dtype=torch.uint8, device=device)]
    created = ctypes.c_void_p()
    memory = torch.empty((4 << 20) + PAGE, dtype=torch.uint8)
    aligned = memory.data_ptr() + -memory.data_ptr() % PAGE

    def on(*works: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with torch.cuda.stream(other):
                for work in works:
                    work()

        return run

    return {
        "query of another stream": other.query,
        "record and query an event": on(event.record, event.query),
        "launch of a loaded kernel": on(lambda: x + 1),
        "synchronize another stream": on(other.synchronize),
        "item() on another stream": on(lambda: torch.linalg.vector_norm(x).item()),
        "copy to pinned": on(lambda: pinned.copy_(x, non_blocking=True), other.synchronize),
        "copy to pageable": on(lambda: pageable.copy_(x)),
        "copy to pageable, default stream": lambda: pageable.copy_(x),
        "small allocation (cached)": lambda: torch.empty(1 << 18, device=device),
        "cudaMalloc": lambda: big.append(torch.empty(512 << 20, dtype=torch.uint8, device=device)),
        "cudaHostAlloc": lambda: torch.empty(8 << 20, dtype=torch.uint8, pin_memory=True),
        "cudaHostRegister": lambda: (memory, runtime.cudaHostRegister(aligned, 4 << 20, 0)),
        "cudaStreamCreate": lambda: runtime.cudaStreamCreate(ctypes.addressof(created)),
        "first launch of a torch kernel": on(lambda: torch.roll(x, 7)),
        "first launch of a Triton kernel": on(lambda: _fresh_kernel(x)),
        "cudaFree (empty_cache)": on(big.clear, torch.cuda.empty_cache),
        "device synchronize": torch.cuda.synchronize,
    }


def run(device: torch.device) -> dict[str, Any]:
    """Make each call while a persistent kernel waits for the host; abort the kernel, and see the call end."""
    x, out = torch.randn(N, device=device), torch.zeros(N, device=device)
    plane = plane_of(device, nbytes=1 << 23)
    plane.warm_up((torch.float32,))
    other = torch.cuda.Stream()
    torch.linalg.vector_norm(x).item()
    (x + 1).sum()
    torch.cuda.synchronize()
    rows: list[dict[str, Any]] = []
    for name, call in _calls(x, other).items():
        job = plane.open(x, out, 2)
        job.post(Command(OperationKind.STORE, 0, N))
        while not job.begun:
            time.sleep(1e-4)
        row: dict[str, Any] = {"call": name}

        def timed(call: Callable[[], object] = call, row: dict[str, Any] = row) -> None:
            begin = time.perf_counter()
            with contextlib.suppress(RuntimeError):
                call()
            row["ms"] = 1e3 * (time.perf_counter() - begin)

        caller = threading.Thread(target=timed, daemon=True)
        caller.start()
        until = time.monotonic() + ALONE_S
        slowest = 0.0
        while caller.is_alive() and time.monotonic() < until:
            begin = time.perf_counter()
            job.completed()  # what an engine does: it must never wait
            slowest = max(slowest, time.perf_counter() - begin)
            time.sleep(1e-3)
        row |= {"waits for the kernel": caller.is_alive(), "engine's slowest look_ms": 1e3 * slowest}
        plane.abort()
        caller.join(GIVE_UP_S)
        rows.append(row)
        sys.stderr.write(f"{row}\n")
        if caller.is_alive():
            return {"ok": False, "rows": rows, "error": f"{name} did not come back after the abort"}
        job.close(failed=True)
        torch.cuda.synchronize()
    return {"ok": True, "loading": os.environ.get("CUDA_MODULE_LOADING"), "rows": rows}
