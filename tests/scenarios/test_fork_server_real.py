"""The fork server of a real job is stopped or killed while a rank is lost: it costs one start at most."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.scenarios.scenario_job import Job, check

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]

STEPS = 40


def fork_server(job: Job) -> int:
    """Its pid: the one of the launcher's children that leads a session and runs the module."""
    children = psutil.Process(job.process.pid).children()
    (server,) = [
        c.pid for c in children if "ft_hsdp.launch.backend.zygote" in c.cmdline() and os.getsid(c.pid) == c.pid
    ]
    return server


def agents(job: Job) -> set[int]:
    """The pids of the state agents."""
    below = psutil.Process(job.process.pid).children(recursive=True)
    return {c.pid for c in below if "ft_hsdp.state.agent.server" in c.cmdline()}


@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_the_others_go_on_and_the_lost_one_returns(tmp_path: Path, number: signal.Signals) -> None:
    with Job(tmp_path, STEPS, replicas=2, ranks_per_replica=1, timeouts__spawn_s=2.0) as job:
        job.until(lambda: job.step() >= 5, "some steps")
        server, kept, other = fork_server(job), agents(job), job.pid(0, 0)
        assert len(kept) == 2
        os.kill(server, number)
        job.signal(1, 0, signal.SIGKILL)
        job.until(lambda: job.events("ForkServerLost", pid=server), "the fork server to be given up")
        assert job.pid(0, 0) == other
        job.until(lambda: job.events("StateRestored", replica=1, origin="agent"), "the copy to be taken over")
        assert kept <= agents(job), "copies in memory are gone with the fork server"
        summary = job.end()
        check(summary, STEPS)
        assert summary["replicas"]["0"]["incarnations"] == 1
        assert summary["replicas"]["1"]["incarnations"] <= 3
        assert not job.events("JobHalted")
        assert job.replayed()["equal"]
