"""Jobs whose model was sharded by the user's own calls of `fully_shard`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compatibility.test_compatibility import SCRIPT
from tests.support.scenarios.scenario_job import ROOT, Job, check
from tests.support.state import lora_loop

LORA: dict[str, Any] = {
    "replicas": 2,
    "ranks_per_replica": 2,
    "entry": str(ROOT / "tests" / "support" / "state" / "lora_loop.py"),
}
TENSORS = 3  # an adapter's matrix, and AdamW's two of its size


@pytest.mark.proof
@pytest.mark.multiproc
def test_healing_a_lora_job_fetches_the_adapters_alone(tmp_path: Path) -> None:
    steps = 80
    with Job(tmp_path, steps, **LORA) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        job.signal(1, 1, signal.SIGKILL)
        summary = job.end()
        check(summary, steps)
        assert [summary["replicas"][r]["incarnations"] for r in "01"] == [1, 2]
        rows = job.rows("replicas/0/commits.jsonl")
        assert [r["step"] for r in rows] == list(range(1, steps + 1)), "the survivor missed a step"
        assert rows[-1]["loss"] < rows[0]["loss"]
        fetched = [e["bytes"] for e in job.events("FetchCompleted", replica=1)]
    adapters = lora_loop.LAYERS * 2 * lora_loop.RANK * lora_loop.WIDTH * 4
    assert len(fetched) >= 2, "a fetch of each rank"
    assert 2 * max(fetched) <= 1.1 * TENSORS * adapters


@pytest.mark.proof
@pytest.mark.multiproc
def test_a_replica_with_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path, 100_000, **LORA, args=["--other", "1"]) as job:
        refused = "digest of the frozen weights and buffers"
        job.until(lambda: any(refused in str(e) for e in job.rows("events.jsonl")), "one of the two is refused")


@pytest.mark.soak
@pytest.mark.multiproc
def test_running_statistics_do_not_depend_on_a_loss(tmp_path: Path) -> None:
    """A replica that comes back has them, a replay finds every bit, and a run without the loss ends alike."""
    digests, steps, kill = set(), 24, {"at_step": 8, "replicas": [1], "rank": 1}
    for name, chaos in (("killed", [kill]), ("whole", [])):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"entry": str(SCRIPT), "args": ["batch_norm", str(folder / "weights.pt")], "chaos": chaos}
        settings |= {"replicas": 2, "train__accumulate": 2, "quorum__min_replicas": 2}
        with Job(folder, steps, **settings) as job:
            summary = job.end()
            check(summary, steps)
            digests |= {replica["digest"] for replica in summary["replicas"].values()}
            assert len(job.events("ReplicaStarted", replica=1)) == 1 + len(chaos)
            if chaos:
                assert job.replayed()["equal"]
    assert len(digests) == 1
    found = [torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("killed", "whole")]
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())
    assert found[0]["body.1.num_batches_tracked"] == steps
