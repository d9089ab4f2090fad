"""SIGSTOP of real ranks: silence is not death, and nobody diverges over it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import Job, check

pytestmark = pytest.mark.multiproc


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_twice_for_four_seconds(tmp_path: Path, rank: int) -> None:
    """With the defaults the others go on without it, and it heals when it continues. All end equal."""
    steps = 150  # they must last for both stops, on a fast machine, too
    with Job(tmp_path, steps) as job:
        for at in (5, 25):
            job.until(lambda at=at: job.step() >= at, f"step {at}")
            pid = job.signal(1, rank, signal.SIGSTOP)
            time.sleep(4.0)  # the length of the stop is what is tested
            os.kill(pid, signal.SIGCONT)
        summary = job.end()
        check(summary, steps)
        assert [r for r in job.rows("metrics.jsonl") if r["contributors"] == [0, 2]], "nobody went on without it"
        silent = [e for e in job.events("RingBroken") if "no sign of life" in e["reason"] and e["replica"] != 1]
        assert {e["suspect"] for e in silent} == {1}, "the wrong one is suspected"
        assert all(summary["replicas"][r]["incarnations"] == 1 for r in ("0", "2")), "a survivor was restarted"
        assert job.replayed()["equal"]


@pytest.mark.proof
def test_stopped_for_good_is_evicted_and_replaced(tmp_path: Path) -> None:
    """Silence is seen, then the supervisor kills what is stopped, and a new incarnation heals."""
    steps = 150
    with Job(tmp_path, steps, **{"timeouts.evict_s": 4.0}) as job:
        job.until(lambda: len(job.progress()) == 6 and job.step() >= 5, "all ranks are heard")
        job.signal(1, 0, signal.SIGSTOP)

        def silent() -> bool:
            replicas = job.overview()["replicas"]
            ages = {(r["replica"], rank["rank"]): rank["age_s"] for r in replicas for rank in r["ranks"]}
            return (1, 0) not in ages or ages[1, 0] > 2.5

        job.until(silent, "its beats are missed", 30)
        summary = job.end()
        check(summary, steps)
        assert {r: s["incarnations"] for r, s in summary["replicas"].items()} == {"0": 1, "1": 2, "2": 1}
        assert job.events("ReplicaEvicted", replica=1), "nobody was evicted"
        assert job.rows("metrics.jsonl")[-1]["contributors"] == [0, 1, 2], "replica 1 did not come back"
