"""SIGSTOP of real ranks: silence is not death, and nobody diverges over it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from scenario_job import Job, check

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(("rank", "timeout_s"), [(0, 1.0), pytest.param(1, 60.0, marks=pytest.mark.proof)])
def test_stopped_twice_for_four_seconds(tmp_path: Path, rank: int, timeout_s: float) -> None:
    """With a short ring timeout the others go on without it; with a long one they wait. All end equal."""
    steps = 60
    limits = {"ftar.timeout_s": timeout_s, "ftar.connect_timeout_s": 1.0, "quorum.suspect_grace_s": 0.3}
    with Job(tmp_path, steps, **limits) as job:
        for at in (5, 25):
            job.until(lambda at=at: job.step() >= at, f"step {at}")
            pid = job.signal(1, rank, signal.SIGSTOP)
            time.sleep(4.0)  # the length of the stop is what is tested
            os.kill(pid, signal.SIGCONT)
        summary = job.end()
        check(summary, steps)
        alone = [r for r in job.rows("metrics.jsonl") if r["contributors"] == [0, 2]]
        assert bool(alone) == (timeout_s < 4.0), "who waits for whom does not follow from ftar.timeout_s"
        assert all(summary["replicas"][r]["incarnations"] == 1 for r in ("0", "2")), "a survivor was restarted"
        assert job.replayed()["equal"]


@pytest.mark.proof
def test_stopped_for_good_is_evicted_and_replaced(tmp_path: Path) -> None:
    """Silence leads to eviction: the supervisor kills what is stopped, and a new incarnation heals."""
    limits = {
        "ftar.timeout_s": 1.0,
        "ftar.connect_timeout_s": 1.0,
        "quorum.suspect_grace_s": 0.3,
        "quorum.evict_s": 2.0,
    }
    steps = 60
    with Job(tmp_path, steps, **limits) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        job.signal(1, 0, signal.SIGSTOP)
        summary = job.end()
        check(summary, steps)
        assert {r: s["incarnations"] for r, s in summary["replicas"].items()} == {"0": 1, "1": 2, "2": 1}
        assert job.events("ReplicaEvicted", replica=1), "nobody was evicted"
        assert job.rows("metrics.jsonl")[-1]["contributors"] == [0, 1, 2], "replica 1 did not come back"
