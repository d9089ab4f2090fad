"""Real replicas are told to end: they leave in peace, keep what they know, and leave no process behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.launch import admin
from ft_hsdp.launch.run.directory import RunDir, read_json
from ft_hsdp.launch.run.status import status
from tests.support.aborted import aborted
from tests.support.scenarios.scenario_job import Job, check
from tests.support.torchrun_job import TorchrunJob

pytestmark = pytest.mark.multiproc

SMALL: dict[str, Any] = {"replicas": 2, "ranks_per_replica": 1}
ENDLESS = 100_000
STEPS = 1500


def nothing_runs(job: Job) -> None:
    """No process of this run is left."""
    of_run = (
        p for p in psutil.process_iter(["cmdline"]) if any(str(job.run) in w for w in p.info["cmdline"] or ())
    )
    left = [p.cmdline() for p in of_run]
    assert not left, left


def beside(job: Job) -> list[psutil.Process]:
    """All processes below the job's own."""
    return psutil.Process(job.process.pid).children(recursive=True)


def undisturbed(job: Job) -> None:
    """No ring broke, no step was repeated, nobody was killed."""
    assert aborted(job.rows("events.jsonl")) == []
    assert {e["kind"] for e in job.events("ReplicaExited")} <= {"stopped", "done", "left"}


@pytest.mark.proof
def test_ctrl_c_once_writes_the_state_and_the_same_command_goes_on_from_it(tmp_path: Path) -> None:
    kept = {**SMALL, "checkpoint__dir": str(tmp_path / "checkpoints")}
    with Job(tmp_path, ENDLESS, **kept) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        job.process.send_signal(signal.SIGINT)
        stopped = job.end(130)
        undisturbed(job)
        nothing_runs(job)
        (written,) = job.events("CheckpointWritten")
        assert written["step"] == stopped["steps"] == job.step()
        assert (stopped["failures"], stopped.get("lost")) == ([], None)
        said = job.log.read_text()
        assert (
            "stopping: the step is ended, a checkpoint is written, all leave within 10 s; once more stops" in said
        )
        assert f"the state of step {stopped['steps']} is in {tmp_path / 'checkpoints'}: the same command" in said
    steps = stopped["steps"] + 20
    with Job(tmp_path, steps, **kept) as job:
        check(job.end(), steps)
        assert [r["step"] for r in job.rows("metrics.jsonl")] == list(range(stopped["steps"] + 1, steps + 1))
        assert job.replayed()["equal"]


@pytest.mark.proof
def test_ctrl_c_twice_leaves_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, ENDLESS, **SMALL) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        below = beside(job)
        pid = job.pid(1, 0)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it cannot leave
        job.process.send_signal(signal.SIGINT)
        job.until(lambda: "stopping: " in job.log.read_text(), "the first word")
        began = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        job.end(130)
        assert time.monotonic() - began < 8.0, "it waited for the replicas"
        nothing_runs(job)
        _, left = psutil.wait_procs(below, timeout=5.0)
        assert not left


@pytest.mark.soak
def test_sigterm_to_replicas_by_hand(tmp_path: Path) -> None:
    """One beyond those that are wanted rests, joins, leaves on SIGTERM, and is not waited for at the end."""
    settings = f"""
replicas: 2
max_replicas: 3
ranks_per_replica: 1
train: {{steps: {STEPS}, micro_batch: 2, seq_len: 32}}
model: {{dim: 64, layers: 2, heads: 2}}
data: {{path: stdlib, max_bytes: 1048576}}
"""
    with TorchrunJob(tmp_path, settings) as job:
        zero, one, two = (job.replica(r) for r in range(3))
        job.until(lambda: job.step(0) >= 5, "step 5")
        job.until(lambda: _row(job, 2)["state"] == "drained", "the rest of replica 2")
        assert (two.poll(), job.rows(2, "supervisor.jsonl")) == (None, [])
        admin.order(RunDir(job.run), "scale", replicas=3)
        job.until(lambda: job.rows(0)[-1]["contributors"] == [0, 1, 2], "replica 2 contributes")
        # SIGTERM to its supervisor: it leaves, and is given up until somebody starts it.
        two.send_signal(signal.SIGTERM)
        job.until(lambda: "LeaveRequested" in {e["event"] for e in job.rows(2, "events.jsonl")}, "it is told")
        two.send_signal(signal.SIGTERM)  # schedulers say it twice
        job.until(lambda: two.poll() is not None, "the end of replica 2")
        assert two.returncode == 143
        job.until(lambda: job.rows(0)[-1]["contributors"] == [0, 1], "the others go on")
        assert _row(job, 2)["state"] == "lost"
        # SIGTERM to a rank: its replica leaves, and is started again.
        (rank,) = read_json(RunDir(job.run).processes(1))["ranks"]
        os.kill(rank["pid"], signal.SIGTERM)
        job.until(lambda: len(_exits(job, 1)) == 1, "the end of that life")
        job.until(lambda: job.rows(0)[-1]["contributors"] == [0, 1], "replica 1 is back")
        assert [e["kind"] for e in _exits(job, 1)] == ["left"]
        while (step := job.step(0)) < STEPS:  # as long as it takes, while steps are made
            job.until(lambda step=step: job.step(0) > step, f"a step after {step}")
        job.until(lambda: None not in (zero.poll(), one.poll()), "the end")
        assert (zero.returncode, one.returncode) == (0, 0)
        ends = [read_json(RunDir(job.run).final(r)) for r in (0, 1)]
        assert ends[0]["digest"] == ends[1]["digest"]
        assert aborted(e for r in range(3) for e in job.rows(r, "events.jsonl")) == []


def _row(job: TorchrunJob, replica: int) -> dict[str, Any]:
    """What the status says of a replica."""
    rows: list[dict[str, Any]] = status(RunDir(job.run))["replicas"]
    return rows[replica]


def _exits(job: TorchrunJob, replica: int) -> list[dict[str, Any]]:
    """The ends of a replica's incarnations, as its supervisor saw them."""
    return [e for e in job.rows(replica, "supervisor.jsonl") if e["event"] == "ReplicaExited"]
