"""Measures NCCL's all-reduce between two ranks on one device, where this NCCL allows that. GPU only."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SHARES_SINCE = (2, 30)  # the NCCL version that first allows two ranks on one device
MIB = 2**20


def run() -> dict[str, Any]:
    """Return the milliseconds of a 64 MiB fp32 all-reduce between two ranks, or a note why there are none."""
    version = torch.cuda.nccl.version()
    if version < SHARES_SINCE:
        return {"ok": True, "note": f"NCCL {'.'.join(map(str, version))} does not put two ranks on one device"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kernels.nccl", str(rank), str(port)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        return {"ok": True, "note": "NCCL did not finish with two ranks on one device"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        return {"ok": True, "note": "NCCL failed with two ranks on one device"}
    return {"ok": True, "mib": 64, "ms": float(said[0].split()[-1])}


def main(rank: int, port: int) -> None:
    """Run one rank and print the median time in milliseconds."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    tensor = torch.randn(16 * MIB, device="cuda")
    times = []
    for _ in range(25):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    sys.stdout.write(f"{1e3 * statistics.median(times[5:])}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
