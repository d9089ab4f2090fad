"""What control groups leave to this process: in a container, less than its machine has.

Their limits, version 1 or 2, are read on all levels above this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # version 1 writes a huge number if there is no limit


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the tightest limits leave to this process; None: there is no limit."""

    memory: int | None = None  # bytes
    cpus: float | None = None  # processors
    threads: int | None = None


def allowance(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Allowance:
    """Return the tightest of all limits above this process; none on a machine without control groups."""
    memory = [free for folder in _levels("memory", membership, root) if (free := _memory(folder)) is not None]
    cpus = [quota for folder in _levels("cpu", membership, root) if (quota := _cpus(folder)) is not None]
    threads = [free for folder in _levels("pids", membership, root) if (free := _threads(folder)) is not None]
    return Allowance(min(memory, default=None), min(cpus, default=None), min(threads, default=None))


def _levels(controller: str, membership: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of a controller, this process's own first.

    In a container, the container's own folder may be the root, or the path may exist on the host only.
    """
    try:
        lines = membership.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = os.fsdecode(line).split(":", 2)
        top = root if not names else root / controller
        if names and controller not in names.split(","):
            continue
        folder = top / path.strip("/")
        while True:
            yield folder
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _memory(folder: Path) -> int | None:
    """Return the bytes that may still be used. The cache of files counts as free: the kernel drops it first."""
    limit = _number(folder / "memory.max")
    if limit is not None:
        used, cached = _number(folder / "memory.current"), _stat(folder, "inactive_file")
    else:
        limit = _number(folder / "memory.limit_in_bytes")
        used, cached = _number(folder / "memory.usage_in_bytes"), _stat(folder, "total_inactive_file")
    return None if limit is None or limit >= _NO_LIMIT else max(0, limit - max(0, (used or 0) - cached))


def _cpus(folder: Path) -> float | None:
    """Return the limit on processor time, in processors."""
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        parts = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        quota, period = (str(part or 0) for part in parts)
    try:
        return float(quota) / float(period) if float(quota) > 0 else None
    except (ValueError, ZeroDivisionError):
        return None  # "max"


def _threads(folder: Path) -> int | None:
    limit = _number(folder / "pids.max")
    return None if limit is None else max(0, limit - (_number(folder / "pids.current") or 0))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _stat(folder: Path, key: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
