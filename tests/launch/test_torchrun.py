"""`torchrun ... launcher.py replica CONFIG --replica N`: torchrun supervises the ranks instead of us."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from aborted import aborted
from torchrun_job import ROOT, TorchrunJob, check

STEPS = 60
SETTINGS = f"""
replicas: 2
ranks_per_replica: 2
train: {{steps: {STEPS}, micro_batch: 2, seq_len: 32}}
model: {{dim: 64, layers: 2, heads: 2}}
data: {{path: stdlib, max_bytes: 1048576}}
optim: {{clip: 1.0}}
"""


@pytest.mark.multiproc
@pytest.mark.proof
def test_replicas_under_torchrun_survive_the_loss_of_a_leader(tmp_path: Path) -> None:
    with TorchrunJob(tmp_path, SETTINGS) as job:
        launcher = ROOT / "launcher.py"
        replicas = [job.torchrun(r, 2, launcher, "replica", "CONFIG") for r in range(2)]
        job.until(lambda: job.step(1) >= 5, "step 5")
        job.kill(replicas[0], 0)
        check(job.finals(replicas), STEPS, ["1", "0"])
        assert [r["step"] for r in job.rows(1)] == list(range(1, STEPS + 1)), "the survivor missed a step"


@pytest.mark.multiproc
@pytest.mark.proof
def test_a_rank_that_is_told_to_end_takes_its_replica_with_it_and_torchrun_starts_it_again(tmp_path: Path) -> None:
    """No step is repeated for it, whichever rank it is."""
    with TorchrunJob(tmp_path, SETTINGS.replace(f"steps: {STEPS}", f"steps: {4 * STEPS}")) as job:
        launcher = ROOT / "launcher.py"
        replicas = [job.torchrun(r, 2, launcher, "replica", "CONFIG") for r in range(2)]
        job.until(lambda: job.step(1) >= 5, "step 5")
        job.kill(replicas[0], 1, signal.SIGTERM)
        check(job.finals(replicas), 4 * STEPS, ["1", "0"])
        events = [e for r in range(2) for e in job.rows(r, "events.jsonl")]
        assert "LeaveRequested" in {e["event"] for e in events}
        assert aborted(events) == []
