"""Fewer than `quorum.min_replicas` hold the newest state, and copies are made on demand: nobody trains alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import Job, check

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]

STEPS = 60
SETTINGS = {"quorum__min_replicas": 2, "state__snapshot": "on_demand"}


def lose(job: Job, replica: int) -> None:
    """Kill a replica, and the agents in which its copies were."""
    os.kill(job.agent(replica), signal.SIGKILL)
    job.signal(replica, 0, signal.SIGKILL)


def never_alone(job: Job) -> None:
    """Each step was made by two at least, and all of them once."""
    rows = job.rows("metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert min(len(row["contributors"]) for row in rows) >= 2
    assert job.replayed()["equal"]


def test_those_that_come_back_with_nothing_fetch_the_state_before_the_next_step(tmp_path: Path) -> None:
    with Job(tmp_path, STEPS, **SETTINGS) as job:
        job.until(lambda: job.step() >= 5, "some steps")
        lose(job, 1)
        lose(job, 2)
        check(job.end(), STEPS)
        assert {e["replica"] for e in job.events("FetchCompleted")} == {1, 2}
        assert any("min_replicas is 2" in e["reason"] for e in job.events("Waiting"))
        assert len(job.events("ReplicaStarted", replica=0)) == 1, "the one that held the state did not survive"
        never_alone(job)


def test_the_only_holder_loses_its_agents_while_it_is_fetched_from(tmp_path: Path) -> None:
    with Job(tmp_path, STEPS, replicas=2, **SETTINGS) as job:
        job.until(lambda: job.step() >= 5, "some steps")
        lose(job, 1)
        job.until(lambda: job.events("FetchStarted", replica=1), "replica 1 begins to fetch")
        os.kill(job.agent(0), signal.SIGKILL)
        check(job.end(), STEPS)
        assert len(job.events("ReplicaStarted", replica=0)) == 1, "the one that held the state did not survive"
        never_alone(job)


def test_the_only_holder_has_lost_its_agents_before(tmp_path: Path) -> None:
    with Job(tmp_path, STEPS, replicas=2, **SETTINGS) as job:
        job.until(lambda: job.step() >= 5, "some steps")
        os.kill(job.agent(0), signal.SIGKILL)
        lose(job, 1)
        check(job.end(), STEPS)
        assert job.events("StateAgentFound", replica=0)
        assert job.events("FetchCompleted", replica=1, donor=0)
        never_alone(job)
