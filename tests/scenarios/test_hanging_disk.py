"""The disk of the run directory, of the lighthouse's store and of the checkpoints hangs: no step waits for it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import Job, check, own_disk

MOUNT = 'truncate -s 200M "$1.img" && mkfs.ext4 -q "$1.img" && mount -o loop "$1.img" "$1"'
HANG_S = 13.0  # longer than a silent lighthouse or a silent replica is waited for


@contextmanager
def frozen(holder: int, folder: Path) -> Iterator[None]:
    """No process gets on that writes there, or opens a file to write."""
    within = ["nsenter", "--mount", "--target", str(holder), "--", "fsfreeze"]
    subprocess.run([*within, "--freeze", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run([*within, "--unfreeze", str(folder)], check=True)


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(), reason="mounts a file system of its own"
)
def test_no_step_waits_and_nobody_is_suspected(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    kept = {"checkpoint.dir": str(runs / "kept"), "checkpoint.every": 10}
    with own_disk(runs, MOUNT) as holder, Job(tmp_path, 10_000, holder, ranks_per_replica=1, **kept) as job:
        job.until(lambda: job.step() >= 15, "step 15")
        began = time.time()
        with frozen(holder, runs):
            time.sleep(HANG_S)
        ended, at = time.time(), job.step()
        job.until(lambda: job.step() > at, "its logs go on")
        job.process.send_signal(signal.SIGTERM)
        summary = job.end(143)
        check(summary, summary["steps"])
        exits = [e for e in job.events("ReplicaExited") if e["kind"] not in ("done", "left")]
        assert not exits, exits
        assert not job.events("LighthouseExited"), "the lighthouse was restarted"
        assert not job.events("RingBroken"), "somebody was suspected"
        quarter = (ended - began) / 4
        times = [row["t"] for row in job.rows("metrics.jsonl") if "step_s" in row]
        parts = {int((t - began) // quarter) for t in times if began < t < ended}
        assert parts >= {1, 2, 3}, "steps waited for the disk"
