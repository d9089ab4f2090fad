"""The sizes of a job, and what this container may use.

Sizes are those of the model and of what the job holds in memory. Control groups of either version are read on all
levels above this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ft_hsdp.config import Config


def parameters(config: Config) -> int:
    """Number of parameters of the model, embedding and head included."""
    from ft_hsdp.train.tokens import VOCABULARY  # numpy is not needed for --help

    model = config.model
    kv = model.dim // model.heads * model.key_value_heads
    block = 2 * model.dim**2 + 2 * model.dim * kv + 3 * model.dim * model.hidden_dim + 2 * model.dim
    return model.layers * block + 2 * VOCABULARY[config.data.tokenizer] * model.dim + model.dim


def weights(config: Config) -> int:
    """Bytes of one fp32 copy of the model."""
    return 4 * parameters(config)


def gib(size: float) -> str:
    """Bytes in GiB, for people."""
    return f"{size / 2**30:.1f} GiB"


MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # version 1 says so with a huge number


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of the tightest limits; None: there is none. Bytes, processors, and threads."""

    memory: int | None = None
    cpus: float | None = None
    threads: int | None = None


def allowance(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Allowance:
    """The tightest of all limits above this process; of a machine without control groups, none."""
    memory = [free for folder in _levels("memory", membership, root) if (free := _memory(folder)) is not None]
    cpus = [quota for folder in _levels("cpu", membership, root) if (quota := _cpus(folder)) is not None]
    threads = [free for folder in _levels("pids", membership, root) if (free := _threads(folder)) is not None]
    return Allowance(min(memory, default=None), min(cpus, default=None), min(threads, default=None))


def _levels(controller: str, membership: Path, root: Path) -> Iterator[Path]:
    """The folders of a controller, this process's own first.

    A container may see its own as the top, or be named by a path that only its host has.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
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
    """Bytes that may still be used; caches of files are given up first."""
    limit = _number(folder / "memory.max")
    if limit is not None:
        used, cached = _number(folder / "memory.current"), _stat(folder, "inactive_file")
    else:
        limit = _number(folder / "memory.limit_in_bytes")
        used, cached = _number(folder / "memory.usage_in_bytes"), _stat(folder, "total_inactive_file")
    return None if limit is None or limit >= _NO_LIMIT else max(0, limit - max(0, (used or 0) - cached))


def _cpus(folder: Path) -> float | None:
    """Processors' worth of time."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
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
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _stat(folder: Path, key: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
