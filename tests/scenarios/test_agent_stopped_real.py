"""The state agent of one replica of a real job is stopped for good: one stall, then another one serves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.scenarios.scenario_job import Job, check

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]

STEPS = 150
SLOW = {"train__micro_batch": 16, "train__seq_len": 64}  # steps long enough for an agent to start meanwhile
WAITS = {"timeouts__agent_answer_s": 0.5, "timeouts__agent_s": 4.0}


def test_votes_go_on_and_another_agent_serves_fetches(tmp_path: Path) -> None:
    with Job(tmp_path, STEPS, replicas=2, ranks_per_replica=1, **SLOW, **WAITS) as job:
        job.until(lambda: job.step() >= 5, "some steps")
        stopped = job.agent(0)
        os.kill(stopped, signal.SIGSTOP)
        job.until(lambda: job.events("StateAgentLost", replica=0), "the agent to be given up")
        gone_on = job.step()
        job.until(lambda: job.step() >= gone_on + 10, "steps without an agent")
        assert len(job.events("StateAgentLost", replica=0)) == 1, "a vote waited for it again"
        job.until(lambda: job.events("StateAgentFound", replica=0), "another agent")
        assert not psutil.pid_exists(stopped) or psutil.Process(stopped).status() == psutil.STATUS_ZOMBIE
        os.kill(job.agent(1), signal.SIGKILL)  # all that replica 1 keeps
        job.signal(1, 0, signal.SIGKILL)
        check(job.end(), STEPS)
        assert job.events("FetchCompleted", replica=1, donor=0), "the new agent gave it nothing"
        assert len(job.events("StateAgentLost", replica=0)) == 1
        assert not job.events("RingBroken", replica=1, suspect=0)
