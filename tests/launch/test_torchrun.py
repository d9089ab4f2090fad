"""`torchrun ... launcher.py replica CONFIG --replica N`: torchrun supervises the ranks instead of us."""

from pathlib import Path

import psutil
import pytest

from tests.support.aborted import aborted
from tests.support.torchrun_job import TorchrunJob

pytestmark = pytest.mark.multiproc

STEPS = 60
SETTINGS = f"""
replicas: 2
ranks_per_replica: 2
train: {{steps: {STEPS}, micro_batch: 2, seq_len: 32}}
model: {{dim: 64, layers: 2, heads: 2}}
data: {{path: stdlib, max_bytes: 1048576}}
optim: {{clip: 1.0}}
"""


@pytest.mark.soak
def test_the_ranks_of_a_torchrun_that_is_killed_leave_and_end(tmp_path: Path) -> None:
    """Nobody would end them, or start them again; the others repeat no step for it."""
    with TorchrunJob(tmp_path, SETTINGS.replace(f"steps: {STEPS}", "steps: 100000")) as job:
        replicas = [job.torchrun(r, 2) for r in range(2)]
        job.until(lambda: min(job.step(0), job.step(1)) >= 5, "step 5")
        ranks = [c for c in psutil.Process(replicas[0].pid).children() if "RANK" in c.environ()]
        assert len(ranks) == 2
        replicas[0].kill()
        job.until(lambda: not any(rank.is_running() for rank in ranks), "its ranks end")
        step = job.step(1)
        job.until(lambda: job.step(1) > step + 3, "the other replica trains on")
        assert "LeaveRequested" in {e["event"] for e in job.rows(0, "events.jsonl")}
        assert aborted(job.rows(1, "events.jsonl")) == []
