"""Where and with what a measurement was taken: a figure without it cannot be compared."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

import ft_hsdp
from ft_hsdp.bench.roster import version

PACKAGES = ("torch", "torchft", "mpi4py", "openmpi", "numpy")


def machine() -> dict[str, Any]:
    """Processor, memory, kernel, and what the kernel does to TCP."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "tcp_congestion_default": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "tcp_congestion_allowed": _read("/proc/sys/net/ipv4/tcp_allowed_congestion_control"),
        "load_1min_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str | None]:
    """Of this package, Python and everything that sums here; None where it is absent."""
    found = {package: version(package) for package in PACKAGES}
    return {"ft_hsdp": ft_hsdp.__version__, "python": platform.python_version(), **found}


def now() -> str:
    """Local date and time with its offset, ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _cpu() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
