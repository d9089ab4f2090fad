"""`bench driver`: the driver of a job over a month, its memory and its time per look, with logs that are made up.

Replicas' logs grow by some steps between two looks, as in a job, and the real `Recorder` takes them. Its memory is
the resident memory of its process, after what is free was given back, from `WARM` steps on.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import psutil

from ft_hsdp.config import Config, parse
from ft_hsdp.launch.run.directory import Row, RunDir, write_json
from ft_hsdp.launch.run.recorder import Recorder
from ft_hsdp.launch.run.summary import Summary

REPLICAS = 8
BATCH = 100  # steps between two looks
WARM = 10_000
FAIL_EVERY = 100_000  # steps from one lost replica to the next
GROWTH_MIB = 1.0  # the goal
_PUNCH_HOLE = 3  # with the size of the file kept


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

    def cut(self) -> None:
        """Give back the space of what was read, where the file system can."""
        libc = ctypes.CDLL(None)
        for pair in self._files.values():
            for file in pair:
                size = ctypes.c_long(os.fstat(file.fileno()).st_size & ~4095)
                libc.fallocate(file.fileno(), _PUNCH_HOLE, ctypes.c_long(0), size)

    def close(self) -> None:
        """Close the logs of all replicas."""
        for pair in self._files.values():
            for file in pair:
                file.close()


def run(steps: int, log: TextIO) -> dict[str, Any]:
    """Run a job of ``steps`` steps through the driver; return the figures."""
    folder = Path(tempfile.mkdtemp(prefix="ft_hsdp-driver-"))
    try:
        return _measure(RunDir(folder / "job"), steps, log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(run: RunDir, steps: int, log: TextIO) -> dict[str, Any]:
    config = parse({"replicas": REPLICAS, "ranks_per_replica": 1, "train": {"steps": steps}})
    for replica in range(REPLICAS):
        run.replica(replica).mkdir(parents=True)
    logs, recorder = Logs(run, config), Recorder(run, config, lambda _: None, lambda _: None)
    for replica in range(REPLICAS):
        recorder.emit(_event("ReplicaStarted", 0.0, replica, 0))
    warm = min(WARM, steps // 2)
    looks: list[float] = []
    windows: list[tuple[int, float]] = []  # step, median look since the window before
    resident, grown = 0, 0
    for first in range(1, steps + 1, BATCH):
        end = min(first + BATCH, steps + 1)
        logs.write(first, end)
        began = time.perf_counter()
        recorder.poll()
        looks.append(time.perf_counter() - began)
        if end - 1 == warm or (end - 1) % max(1, steps // 20) == 0:
            while recorder.poll():  # it may be behind: one look takes only a piece
                pass
            logs.cut()
            now, look = _resident(), statistics.median(looks)
            looks.clear()
            if end - 1 <= warm:
                resident = now
                continue
            grown = max(grown, now - resident)
            windows.append((end - 1, look))
            log.write(f"step {end - 1}: {(now - resident) / 2**20:+.2f} MiB, a look takes {look * 1e3:.2f} ms\n")
    for replica in range(REPLICAS):
        state = {"step": steps, "commit_epoch": 1, "lineage": _lineage(steps), "digest": "d", "incarnation": "x"}
        write_json(run.final(replica), state)
    began = time.perf_counter()
    summary = recorder.finish()
    finish_s = time.perf_counter() - began
    recorder.close()
    logs.close()
    assert _complete(summary, steps), summary
    return {
        "steps": steps,
        "replicas": REPLICAS,
        "grown_mib": grown / 2**20,
        "look_ms_first": windows[0][1] * 1e3,
        "look_ms_last": windows[-1][1] * 1e3,
        "finish_s": finish_s,
        "ok": grown / 2**20 <= GROWTH_MIB,
    }


def _resident() -> int:
    """Return the bytes of this process, without what it could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def _complete(summary: Summary, steps: int) -> bool:
    batches = {"trained": steps * REPLICAS, "duplicated": 0, "skipped": 0}
    return summary["steps"] == steps and summary["batches"] == batches


def _line(row: Row) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _lineage(step: int) -> str:
    return f"{step:032x}"


def _event(name: str, t: float, replica: int, life: int) -> Row:
    who = {"replica": replica, "incarnation": f"{replica}-a-{life}"}
    return {"t": t, "event": name, "source": "supervisor", **who, "reason": "bench"}


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
