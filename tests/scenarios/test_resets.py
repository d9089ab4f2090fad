"""The connections of a replica to its neighbours are reset: the ring is repaired in place, and no process ends."""

from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import Job

STEPS = 16


@pytest.mark.proof
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_reset_ring_is_formed_again_and_no_rank_ends(tmp_path: Path, transport: str) -> None:
    chaos = [{"kind": "reset", "at_step": step, "replicas": [step % 2]} for step in (5, 10)]
    with Job(tmp_path, STEPS, replicas=2, ftar__transport=transport, chaos=chaos) as job:
        summary = job.ends_well(STEPS)
        assert [row["kind"] for row in job.events("FailureInjected")] == ["reset", "reset"]
        assert job.events("RingBroken"), "a ring broke"
        assert len(job.events("EpochGranted")) >= 3, "and was formed again after each reset"
        assert len(job.events("ReplicaStarted")) == 2, "in the lives that there were"
        assert (summary["failures"], summary["recoveries"]) == ([], [])
