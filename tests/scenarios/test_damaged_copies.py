"""A copy of a state, or a rank's own memory, is damaged or missing: found before it is used, no halt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.core.state_id import SLICES
from tests.support.scenarios.scenario_job import Job, check

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]

STEPS = 30
FLIPPED = {  # the newest copy of rank 1 flips, and the rank dies at once
    "snapshot-flip": {"replicas": [0], "rank": 1, "step": 8},
    "snapshot-kept": {"replicas": [0], "rank": 1, "step": 8},
}


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_flipped_copy_is_not_restored(tmp_path: Path, replicas: int) -> None:
    """Alone the replica goes on from the copy before; beside another one it fetches what it lacks."""
    points: dict[str, Any] = dict(FLIPPED)
    with Job(tmp_path, STEPS, replicas=replicas, debug__failpoints=points) as job:
        summary = job.end()
        check(summary, STEPS)
        (found,) = job.events("SnapshotCorrupt", replica=0, rank=1)
        assert "changed since it was written" in found["reason"]
        (restored,) = job.events("StateRestored", replica=0)
        assert (restored["step"], restored["origin"]) == (found["step"] - 1, "agent")
        assert not job.events("JobHalted")
        assert not job.events("StateDiverged")
        assert job.replayed()["equal"]


def test_a_copy_that_one_rank_left_out_costs_no_older_one(tmp_path: Path) -> None:
    """Rank 1 has no memory for step 8; rank 0, and with it the replica, dies while it copies step 9."""
    points = {
        "snapshot-out": {"replicas": [0], "rank": 1, "step": 8},
        "snapshot": {"replicas": [0], "rank": 0, "step": 9},
    }
    with Job(tmp_path, STEPS, replicas=1, debug__failpoints=points, quorum__on_lost_head="rollback") as job:
        check(job.end(), STEPS)
        assert job.events("SnapshotSkipped", replica=0, rank=1, step=8)
        (restored,) = job.events("StateRestored", replica=0)
        assert (restored["step"], restored["origin"]) == (7, "agent")
        assert job.replayed()["equal"]


@pytest.mark.soak
def test_the_one_of_two_whose_memory_changed_ends_and_comes_back_with_its_copy(tmp_path: Path) -> None:
    """A slice is compared at each step: that of the flipped byte is looked at after step 16."""
    points = {"live-flip": {"replicas": [1], "rank": 0, "step": SLICES}}
    with Job(tmp_path, STEPS, replicas=2, debug__failpoints=points) as job:
        check(job.end(), STEPS)
        (found,) = job.events("StateCorrupt", replica=1, rank=0)
        assert "slice 0 of" in found["reason"]
        assert job.events("StateRestored", replica=1, origin="agent")
        assert not job.events("JobHalted")
        assert not job.events("StateDiverged")
        assert job.replayed()["equal"]
