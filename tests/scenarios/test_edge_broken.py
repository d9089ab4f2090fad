"""One connection of a real job never comes about, although both of its ends reach the lighthouse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import Job, check

pytestmark = pytest.mark.multiproc
BOUND_S = 30.0


def until_steps_again(job: Job, members: int) -> None:
    """The edge breaks, and a ring without it commits steps within the bound."""
    job.until(lambda: job.events("FailureInjected"), "the edge is cut")
    (cut,) = job.events("FailureInjected")
    job.until(lambda: job.events("EdgeBroken"), "the lighthouse tells of it", BOUND_S)
    (broken,) = job.events("EdgeBroken")
    assert broken["replicas"] == [0, 1]
    job.until(lambda: len(job.events("EpochGranted")[-1]["members"]) == members, "a ring without it", BOUND_S)
    before = job.step()
    job.until(lambda: job.step() > before, "a step without that edge", BOUND_S)
    assert job.events("RingConnected")[-1]["t"] - cut["t"] < BOUND_S
    storm = [e for e in job.events("EpochGranted") if cut["t"] <= e["t"] <= cut["t"] + 10.0]
    assert len(storm) < 12, "epochs without a step come at a pace"


@pytest.mark.proof
def test_one_of_three_is_left_out(tmp_path: Path) -> None:
    cut = {"kind": "partition", "edge": [0, 1], "at_step": 5, "for_s": 0, "reject": True}
    with Job(tmp_path, 40, ranks_per_replica=1, chaos=[cut]) as job:
        until_steps_again(job, 2)
        check(job.end(), 40)
        assert job.events("EdgeBroken")[0]["excluded"] == 1
        assert len(job.events("ReplicaStarted")) == 3, "nobody exits"
        assert job.replayed()["equal"]


@pytest.mark.soak
def test_one_of_three_is_left_out_when_packets_vanish(tmp_path: Path) -> None:
    cut = {"kind": "partition", "edge": [0, 1], "at_step": 5, "for_s": 0}
    with Job(tmp_path, 40, ranks_per_replica=1, chaos=[cut]) as job:
        until_steps_again(job, 2)
        check(job.end(), 40)


@pytest.mark.soak
def test_the_two_ends_are_put_apart_in_a_ring_of_four(tmp_path: Path) -> None:
    cut = {"kind": "partition", "edge": [0, 1], "at_step": 5, "for_s": 0, "reject": True}
    with Job(tmp_path, 30, replicas=4, ranks_per_replica=1, chaos=[cut]) as job:
        until_steps_again(job, 4)
        check(job.end(), 30)
        assert job.events("EpochGranted")[-1]["members"] == [0, 2, 1, 3]
        assert job.rows("metrics.jsonl")[-1]["contributors"] == [0, 1, 2, 3]
        assert job.replayed()["equal"]
