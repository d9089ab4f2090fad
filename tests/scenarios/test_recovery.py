"""Hosts that are lost with the memory of their agents: what a real job takes its state from."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import Job, check

STEPS = 30


@pytest.mark.proof
def test_a_replica_that_lost_all_its_memory_takes_that_of_one_whose_ranks_are_dead(tmp_path: Path) -> None:
    with Job(tmp_path, STEPS, replicas=2) as job:
        job.until(lambda: job.step() >= 6, "step 6")
        os.kill(job.agent(0), signal.SIGKILL)
        for replica in (0, 1):
            for rank in (0, 1):
                job.signal(replica, rank, signal.SIGKILL)
        summary = job.end()
        check(summary, STEPS)
        assert len(summary["recoveries"]) == 2, summary["recoveries"]
        print(summary["recoveries"], job.events("HeadRolledBack"))
        assert job.replayed()["equal"]
