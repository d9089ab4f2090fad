"""Logs of a job's replicas that are made up, which grow by some steps between two looks."""

from __future__ import annotations

import json

from ft_hsdp.config import Config
from ft_hsdp.launch.run.directory import Row, RunDir

REPLICAS = 8


class Logs:
    """The logs of all replicas of a job."""

    def __init__(self, run: RunDir, config: Config) -> None:
        self._files = {
            r: (run.commits(r).open("ab", buffering=0), run.fed(r).open("ab", buffering=0))
            for r in range(config.slots)
        }

    def write(self, first: int, end: int) -> None:
        """Log the steps from ``first`` up to ``end`` for all replicas."""
        commits = b"".join(_line(_commit(step)) for step in range(first, end))
        for replica, (log, fed) in self._files.items():
            log.write(commits)
            fed.write(b"".join(_line(_fed(replica, step)) for step in range(first, end)))

    def close(self) -> None:
        """Close the logs of all replicas."""
        for pair in self._files.values():
            for file in pair:
                file.close()


def _line(row: Row) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _lineage(step: int) -> str:
    return f"{step:032x}"


def _fed(replica: int, step: int) -> Row:
    line = {"t": float(step), "step": step, "shard": replica, "index": step - 1, "units": 1}
    return {**line, "incarnation": f"{replica}-a-0"}


def _commit(step: int) -> Row:
    """Return a row as replicas write it."""
    who = range(REPLICAS)
    return {
        "t": float(step) + 1.0,
        "step": step,
        "epoch": 1,
        "attempt": 0,
        "lineage": _lineage(step),
        "prev": _lineage(step - 1),
        "ring": [*who],
        "contributors": [*who],
        "contributions": [
            {
                "replica": r,
                "weight": 1,
                "shard": r,
                "index": step - 1,
                "loss": 2.0 + step % 7,
                "units": 1,
                "part": 0,
            }
            for r in who
        ],
        "digest": _lineage(step),
        "poisoned": [],
        "cursors": [step] * REPLICAS,
        "holes": [],
        "loss": 2.0 + 1.0 / step,
        "lr": 1e-3,
        "lr_scale": 1.0,
        "norm": 1.0,
        "total": REPLICAS,
        "units": len(who),
        "units_wanted": REPLICAS,
        "chunk_bytes": 1 << 20,
        "step_s": 1.0 + (step % 13) * 1e-3,
        "waits": {"quorum": 0.001, "ftar": 0.01, "commit": 0.002},
        "ftar_bytes": 1 << 20,
        "ftar_s": 0.1,
        "tokens": 8192,
        "incarnation": "0-a-0",
        "role": "contribute",
    }
