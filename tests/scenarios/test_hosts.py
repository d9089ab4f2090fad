"""Two supervisors of one replica, started by hand: one of them runs it, and the healthy life goes on."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.slow_script import write_slow_script
from tests.support.torchrun_job import TorchrunJob

STEPS = 300  # at STEP_S they last until the new life is there, on a slow machine, too; then they take no time
STEP_S = 0.2
SETTINGS = f"""
replicas: 2
ranks_per_replica: 1
entry: slow.py
train: {{steps: {STEPS}, micro_batch: 16}}
timeouts: {{evict_s: 4.0}}
"""


@pytest.mark.proof
def test_an_old_supervisor_that_thaws_does_not_touch_the_new_life(tmp_path: Path) -> None:
    """The old one is stopped with all that it started; the new one trains; then the old one goes on."""
    hurry = tmp_path / "hurry"
    write_slow_script(tmp_path / "slow.py", hurry, STEP_S)
    with TorchrunJob(tmp_path, SETTINGS) as job:
        zero, old = job.replica(0), job.replica(1)
        job.until(lambda: job.step(1) >= 5, "step 5")
        (first,) = _lives(job)
        new = job.replica(1)
        job.until(lambda: "runs replica 1; this one starts" in _log(job), "the second supervisor stands by")
        assert _lives(job) == [first], "two supervisors are no two lives"
        frozen = [psutil.Process(old.pid), *psutil.Process(old.pid).children(recursive=True)]
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        job.until(lambda: len(_lives(job)) == 2, "the new supervisor starts the replica")
        job.until(lambda: _contributes(job, _lives(job)[1]), "the new life contributes")
        began = job.step(0)
        for process in reversed(frozen):
            process.send_signal(signal.SIGCONT)
        job.until(lambda: _log(job).count("starts it when that one is gone") == 2, "the old one stands by")
        job.until(lambda: job.step(0) >= min(STEPS, began + 20), "the others go on")
        pids = job.events(1, "ReplicaStarted")[0]["pids"]
        assert not [pid for pid in pids if psutil.pid_exists(pid)], "the old life has ended"
        hurry.touch()
        while (step := job.step(0)) < STEPS:
            job.until(lambda step=step: job.step(0) > step, f"a step after {step}")
        finals = job.finals([zero, new, old])
        assert len(_lives(job)) == 2, "no life was started because of the other supervisor"
        assert [e["incarnation"] for e in job.events(1, "ReplicaExited") if e["kind"] != "done"] == [first]
        fenced = [e for e in job.told("AskRefused") if "fenced" in e["reason"]]
        assert len(fenced) <= 1, "at most the old life, once"
        for granted in job.told("EpochGranted"):
            assert len(set(granted["members"])) == len(granted["members"])
        assert finals[0]["digest"] == finals[1]["digest"]


def _lives(job: TorchrunJob) -> list[str]:
    return [e["incarnation"] for e in job.events(1, "ReplicaStarted")]


def _contributes(job: TorchrunJob, incarnation: str) -> bool:
    rows = [r for r in job.rows(1) if r.get("incarnation") == incarnation]
    return bool(rows) and rows[-1].get("role") == "contribute"


def _log(job: TorchrunJob) -> str:
    return (job.folder / "replica1.log").read_text()
