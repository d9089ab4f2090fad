"""`torchrun ... launcher.py replica CONFIG --replica N`: torchrun supervises the ranks instead of us."""

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.aborted import aborted
from tests.support.torchrun_job import ROOT, TorchrunJob

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


@pytest.mark.proof
def test_a_users_script_runs_under_torchrun_and_under_a_supervisor_and_an_edited_one_is_refused(tmp_path) -> None:
    """A rank of it is told to end, which takes its replica with it; no step is repeated for that."""
    script = tmp_path / "mine.py"
    script.write_text((ROOT / "docs" / "examples" / "own_loop.py").read_text())
    settings = "replicas: 2\nranks_per_replica: 2\nentry: mine.py\ntrain: {steps: 120, micro_batch: 16}"
    with TorchrunJob(tmp_path, settings) as job:
        replicas = [job.torchrun(0, 2), job.replica(1)]
        job.until(lambda: min(job.step(0), job.step(1)) >= 5, "step 5")
        whole = script.read_text()
        script.write_text(f"{whole}\n# edited\n")
        job.kill(replicas[0], 1, signal.SIGTERM)
        job.until(lambda: "put it back" in job.tails(), "the refusal")
        script.write_text(whole)
        finals = job.finals(replicas)
        assert len({(f["step"], f["digest"]) for f in finals}) == 1
        job.until((job.run / "summary.json").exists, "the summary")
        summary = json.loads((job.run / "summary.json").read_text())
        assert (summary["steps"], summary["batches"]["duplicated"], summary["batches"]["skipped"]) == (120, 0, 0)
        assert summary["replicas"]["0"]["incarnations"] >= 2
        assert summary["replicas"]["1"]["incarnations"] == 1
        events = [e for r in range(2) for e in job.rows(r, "events.jsonl")]
        assert "LeaveRequested" in {e["event"] for e in events}
        assert aborted(events) == []


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
