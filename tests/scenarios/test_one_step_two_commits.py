"""One step number, two commits: the hole through which the paper's rule and torchft diverge silently."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.scenarios.scenario_job import Job, check

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]


def test_a_replica_that_committed_alone_is_left_behind_and_heals(tmp_path: Path) -> None:
    """Replica 0 commits step 6 and is stopped before anybody hears of it. Its peers, made to lose what they were
    prepared to commit, do step 6 again without it. It comes back at the same step number with another lineage."""
    at, steps = 6, 60
    failpoints = {
        "token-second": {"replicas": [0], "step": at, "signal": "STOP"},
        "record-lost": {"replicas": [1, 2], "step": at},
    }
    limits = {"ftar.timeout_s": 1.0, "timeouts.connect_s": 1.0, "timeouts.silence_grace_s": 0.3}
    limits |= {"timeouts.evict_s": 60.0, "debug.failpoints": failpoints}
    with Job(tmp_path, steps, **limits) as job:
        job.until(lambda: job.step() >= 2, "step 2")
        leader = job.pid(0, 0)
        assert leader is not None
        job.until(lambda: psutil.Process(leader).status() == psutil.STATUS_STOPPED, "replica 0 stops")
        job.until(lambda: job.step() >= at + 3, "the others go on without it")
        os.kill(leader, signal.SIGCONT)
        summary = job.end()
        check(summary, steps)
        assert {r["incarnations"] for r in summary["replicas"].values()} == {1}, "somebody was restarted"
        rows = [x for r in (0, 1) for x in job.rows(f"replicas/{r}/commits.jsonl") if x["step"] == at]
        assert len({x["lineage"] for x in rows}) == 2, "there was only one commit of this step"
        behind = job.events("LeftBehind", replica=0)
        assert behind, "replica 0 was not left behind"
        merged = {r["step"]: r for r in job.rows("metrics.jsonl")}
        assert merged[at]["contributors"] == [1, 2], "the commit that nobody built on is in the metrics"
        assert merged[steps]["contributors"] == [0, 1, 2], "replica 0 did not come back"
        assert job.replayed()["equal"]
