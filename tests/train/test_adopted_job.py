"""Jobs whose model was sharded by the user's own calls of `fully_shard`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.compatibility.test_compatibility import SCRIPT
from tests.support.scenarios import scenario_job
from tests.support.scenarios.scenario_job import Job
from tests.support.state import lora_loop
from tests.support.torchrun_job import ROOT, TorchrunJob, check

LOOP = ROOT / "tests" / "support" / "state" / "lora_loop.py"
SETTINGS = """
replicas: 2
ranks_per_replica: 2
train: {{steps: {steps}}}
"""
TENSORS = 3  # an adapter's matrix, and AdamW's two of its size


@pytest.mark.proof
@pytest.mark.multiproc
def test_healing_a_lora_job_fetches_the_adapters_alone(tmp_path: Path) -> None:
    steps = 80
    with TorchrunJob(tmp_path, SETTINGS.format(steps=steps)) as job:
        replicas = [job.torchrun(r, 2, LOOP, "CONFIG", "--replica", "REPLICA") for r in range(2)]
        job.until(lambda: job.step(0) >= 10, "step 10")
        job.kill(replicas[1], 1)
        finals = job.finals(replicas)
        check(finals, steps, ["0", "1"])
        rows = job.rows(0)
        assert [r["step"] for r in rows] == list(range(1, steps + 1)), "the survivor missed a step"
        assert rows[-1]["loss"] < rows[0]["loss"]
        fetched = [e["bytes"] for e in job.rows(1, "events.jsonl") if e["event"] == "FetchCompleted"]
    adapters = lora_loop.LAYERS * 2 * lora_loop.RANK * lora_loop.WIDTH * 4
    assert len(fetched) >= 2, "a fetch of each rank"
    assert 2 * max(fetched) <= 1.1 * TENSORS * adapters


@pytest.mark.proof
@pytest.mark.multiproc
def test_a_replica_with_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    with TorchrunJob(tmp_path, SETTINGS.format(steps=100_000)) as job:
        job.torchrun(0, 2, LOOP, "CONFIG", "--replica", "REPLICA")
        job.torchrun(1, 2, LOOP, "CONFIG", "--replica", "REPLICA", "--seed", "1")
        refused = "digest of the frozen weights and buffers"
        logs = [tmp_path / f"replica{r}.log" for r in range(2)]
        job.until(lambda: any(refused in log.read_text() for log in logs), "one of the two is refused")


@pytest.mark.proof
@pytest.mark.multiproc
def test_running_statistics_do_not_depend_on_a_loss(tmp_path: Path) -> None:
    """A replica that comes back has them, a replay finds every bit, and a run without the loss ends alike."""
    digests, kill = set(), {"at_step": 20, "replicas": [1], "rank": 1}
    for name, chaos in (("killed", [kill]), ("whole", [])):
        folder = tmp_path / name
        folder.mkdir()
        settings = {"entry": str(SCRIPT), "args": ["batch_norm", str(folder / "weights.pt")], "chaos": chaos}
        settings |= {"replicas": 2, "train__accumulate": 2, "quorum__min_replicas": 2}
        with Job(folder, 50, **settings) as job:
            summary = job.end()
            scenario_job.check(summary, 50)
            digests |= {replica["digest"] for replica in summary["replicas"].values()}
            assert len(job.events("ReplicaStarted", replica=1)) == 1 + len(chaos)
            if chaos:
                assert job.replayed()["equal"]
    assert len(digests) == 1
    found = [torch.load(tmp_path / name / "weights.pt", weights_only=True) for name in ("killed", "whole")]
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())
    assert found[0]["body.1.num_batches_tracked"] == 50
