"""Two agents of one replica, started by hand: one of them runs it, and the healthy life goes on."""

import signal
from pathlib import Path

import psutil
import pytest

from ft_hsdp.launch.run.directory import read_json
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
def test_an_agent_that_thaws_does_not_touch_the_new_life(tmp_path: Path) -> None:
    """The old one is stopped with all that it started; one elsewhere trains; then the old one goes on."""
    hurry = tmp_path / "hurry"
    write_slow_script(tmp_path / "slow.py", hurry, STEP_S)
    with TorchrunJob(tmp_path, SETTINGS) as job:
        zero, old = job.replica(0), job.replica(1, FT_HSDP_HOST="old")
        job.until(lambda: job.step(1) >= 5, "step 5")
        (first,) = _lives(job)
        new = job.replica(1, FT_HSDP_HOST="new")
        job.until(
            lambda: "host new-r1 joined" in (tmp_path / "replica1.log").read_text(), "the second one stands by"
        )
        assert _lives(job) == [first], "two agents are no two lives"
        ranks = read_json(job.folder_of(1) / "processes.json")["ranks"]
        frozen = [psutil.Process(old.pid), *psutil.Process(old.pid).children(recursive=True)]
        for process in frozen:
            process.send_signal(signal.SIGSTOP)
        job.until(lambda: len(_lives(job)) == 2, "the new one starts the replica")
        job.until(lambda: _contributes(job, _lives(job)[1]), "the new life contributes")
        began = job.step(0)
        for process in reversed(frozen):
            process.send_signal(signal.SIGCONT)
        job.until(lambda: not any(psutil.pid_exists(rank["pid"]) for rank in ranks), "the old life ends")
        job.until(lambda: job.step(0) >= min(STEPS, began + 20), "the others go on")
        hurry.touch()
        while (step := job.step(0)) < STEPS:
            job.until(lambda step=step: job.step(0) > step, f"a step after {step}")
        finals = job.finals([zero, new, old])
        assert len(_lives(job)) == 2, "no life was started because of the other agent"
        ends = [e["incarnation"] for e in job.told("ReplicaExited") if e["replica"] == 1 and e["kind"] != "done"]
        assert ends == [first]
        fenced = [e for e in job.told("AskRefused") if "fenced" in e["reason"]]
        assert len(fenced) <= 1, "at most the old life, once"
        for granted in job.told("EpochGranted"):
            assert len(set(granted["members"])) == len(granted["members"])
        assert finals[0]["digest"] == finals[1]["digest"]


def _lives(job: TorchrunJob) -> list[str]:
    return [e["incarnation"] for e in job.told("ReplicaStarted") if e["replica"] == 1]


def _contributes(job: TorchrunJob, incarnation: str) -> bool:
    rows = [r for r in job.rows(1) if r.get("incarnation") == incarnation]
    return bool(rows) and rows[-1].get("role") == "contribute"
