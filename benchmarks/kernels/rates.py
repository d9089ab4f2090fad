"""What a machine is, and how fast it moves and hashes a gradient: the figures from which a step's time follows."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import xxhash

from benchmarks.kernels import stepped
from benchmarks.kernels.ring import PinnedSegment

N = 64 << 20  # elements of fp32: 256 MiB
FIELDS = (
    "name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "clocks.sm,clocks.mem,ecc.mode.current,compute_mode,persistence_mode"
)
TOLD = {
    "device": ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "processor": ["lscpu"],
    "memory": ["free", "-g"],
    "shared memory": ["df", "-h", "/dev/shm"],  # noqa: S108 - it is only asked for its size
    "compiler": ["gcc", "--version"],
    "packages": [sys.executable, "-m", "pip", "list", "--disable-pip-version-check"],
}

_INIT = """
import json, time
begin = time.perf_counter()
import torch
imported = time.perf_counter()
torch.cuda.init()
x = torch.ones(8, device="cuda")
torch.cuda.synchronize()
free, total = torch.cuda.mem_get_info()
print(json.dumps({"import_s": imported - begin, "init_s": time.perf_counter() - imported,
                  "context_mib": (total - free) / 2**20}))
"""


def _told(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).strip()[:6000]


def facts() -> dict[str, Any]:
    """Say what the machine is, and what the driver costs at the start with its kernels loaded early and late."""
    rows: list[dict[str, Any]] = []
    for loading in ("LAZY", "EAGER"):
        environment = os.environ | {"CUDA_MODULE_LOADING": loading}
        done = subprocess.run(
            [sys.executable, "-c", _INIT], env=environment, capture_output=True, text=True, timeout=80, check=False
        )
        told = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-500:]}
        rows.append({"loading": loading, **told})
    machine = {name: _told(command) for name, command in TOLD.items()}
    return {"ok": all("error" not in row for row in rows), "rows": rows, "machine": machine}


def run(device: torch.device) -> dict[str, Any]:
    """Measure copies between device and host, the kernels that stage a gradient, and a host's norm and hash."""
    x = torch.randn(N, device=device)
    rows: list[dict[str, Any]] = []

    def measure(name: str, call: Callable[[], object], repeat: int = 5) -> None:
        times = []
        for _ in range(repeat + 1):  # the first one warms up
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times[1:])
        rows.append({"what": name, "ms": 1e3 * seconds, "gb_s": x.nbytes / seconds / 1e9})
        sys.stderr.write(f"{rows[-1]}\n")

    pageable, pinned = torch.empty(N), torch.empty(N, pin_memory=True)
    shared = torch.frombuffer(mmap.mmap(-1, x.nbytes), dtype=torch.float32)
    segment = PinnedSegment(x.nbytes)
    begin = time.perf_counter()
    segment.pin()
    rows.append({"what": "cudaHostRegister of 256 MiB", "ms": 1e3 * (time.perf_counter() - begin)})
    registered = segment.bytes.view(torch.float32)
    added, sums = torch.empty_like(x), torch.empty_like(x)
    measure("to pageable", lambda: pageable.copy_(x))
    measure("to shared memory that is not registered", lambda: shared.copy_(x))
    measure("to shared memory that is registered", lambda: registered.copy_(x, non_blocking=True))
    measure("to pinned", lambda: pinned.copy_(x, non_blocking=True))
    measure("from pageable", lambda: x.copy_(pageable))
    measure("from pinned", lambda: x.copy_(pinned, non_blocking=True))
    measure("cpu()", x.cpu)
    measure("device: add", lambda: torch.add(x, added, out=sums))
    measure("device: norm in fp64", lambda: torch.linalg.vector_norm(x, dtype=torch.float64))
    measure("device: norm in fp32", lambda: torch.linalg.vector_norm(x))
    for programs in (1, 2, 4, 8, 16):
        for stages in (1, 3):
            how: dict[str, Any] = {"programs": programs, "stages": stages}
            name = f"kernel, {programs} programs, {stages} stages: "
            measure(name + "to registered", partial(stepped.reduce_copy, x, None, registered, **how), 3)
            measure(name + "from registered", partial(stepped.reduce_copy, registered, None, sums, **how), 3)
            both = partial(stepped.reduce_copy, registered, added, registered, sums, **how)
            measure(name + "registered + device to both", both, 3)
    torch.set_num_threads(1)
    measure("host: norm in fp64", lambda: torch.linalg.vector_norm(pageable, dtype=torch.float64), 1)
    content: Any = pageable.numpy()
    measure("host: xxh3-128", lambda: xxhash.xxh3_128_hexdigest(memoryview(content).cast("B")), 3)
    return {"ok": True, "rows": rows}
