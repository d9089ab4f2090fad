"""A rank dies at each place where the protocol could go wrong; what was trained is replayed from the logs."""

from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.core.state_id import SLICES
from ft_hsdp.fault_injection import PLACES
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.verify import verify
from tests.support.programs import inapplicable
from tests.support.scenarios.scenario_job import Job

STEPS = 40
NOT_DEATHS = ("record-lost", "state-flip", "live-flip", "snapshot-flip", "snapshot-out", "copy-out", "check-flip")
LEADER_ONLY = ("token-first", "token-second", "quorum-reply", "checkpoint-rename")
FIRST_KILL = {"at_step": 4, "replicas": [1], "rank": 1, "signal": "KILL"}


def run(folder: Path, points: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A job with these failpoints to its end; its summary, after all that must hold was checked."""
    with Job(folder, STEPS, debug__failpoints=points, restart__budget=50, **settings) as job:
        return job.ends_well(STEPS)


@pytest.mark.proof
def test_several_in_one_run(tmp_path: Path) -> None:
    """In the reduce-scatter, with the verdict known to one alone, half-way through an update, while fetching."""
    points = {
        "reduce-scatter": {"replicas": [0], "rank": 1, "step": 4},
        "fetch": {"replicas": [0], "rank": 0, "life": 1, "step": 1},
        "token-second": {"replicas": [1], "step": 12},
        "apply-middle": {"replicas": [2], "rank": 1, "step": 20},
        "checkpoint-write": {"replicas": [0, 1, 2], "rank": 1, "life": 2, "step": 1},
    }
    summary = run(tmp_path, points, checkpoint__every=5)
    assert {f["replica"] for f in summary["failures"]} == {0, 1, 2}
    assert summary["replicas"]["0"]["incarnations"] >= 3, "it did not die while it fetched"


@pytest.mark.proof
def test_a_flipped_bit_of_one_replica_is_found_and_healed(tmp_path: Path) -> None:
    """With three replicas the one that differs ends before its gradients count; its snapshots are not used."""
    with Job(tmp_path, STEPS, debug__failpoints={"state-flip": {"replicas": [1], "rank": 1, "step": 5}}) as job:
        job.ends_well(STEPS)
        (found,) = job.events("StateDiverged", replica=1)
        assert found["replicas"] == [1]
        assert 5 <= found["step"] < 5 + SLICES
        assert job.events("LeftBehind", replica=1)
        assert {e["rung"] for e in job.events("StateRestored", replica=1)} <= {"initial"}, "a corrupt copy"


@pytest.mark.soak
def test_two_replicas_that_differ_may_begin_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """The byte flips where it is compared next, so nothing was trained with it."""
    points = {"state-flip": {"replicas": [1], "rank": 0, "step": SLICES}}
    settings = {"checkpoint__every": 6, "quorum__on_divergence": "checkpoint"}
    with Job(tmp_path, STEPS, replicas=2, debug__failpoints=points, **settings) as job:
        job.ends_well(STEPS)
        assert job.events("RewindOrdered")
        (rolled,) = job.events("HeadRolledBack")
        assert rolled["steps"] > 1, "steps that metrics.jsonl had are to be undone"
        assert [r["step"] for r in job.rows("metrics.jsonl")] == [*range(1, STEPS + 1)]
        (restored,) = {e["step"] for e in job.events("StateRestored")}
        assert restored in (6, 12), "that of step 12 may still be in writing"
        assert not job.events("JobHalted")
        assert verify(RunDir(job.run)).breaches == []


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", [p for p in PLACES if p not in NOT_DEATHS])
def test_each(tmp_path: Path, place: str, rank: int) -> None:
    if rank and place in LEADER_ONLY:
        inapplicable("only the leader is ever there")
    settings: dict[str, Any] = {}
    point = {"replicas": [1], "rank": rank, "step": 8}
    if place in ("micro-batch", "refill"):
        settings |= {"train__accumulate": 2, "quorum__batch": "constant", "quorum__refill": "same_step"}
    points: dict[str, Any] = {place: point}
    if place == "refill":  # another replica is lost when all have trained what they were to train
        points["reduce-scatter"] = {"replicas": [2], "rank": 1, "step": 8}
    if place == "fetch":
        settings["chaos"] = [FIRST_KILL]
        point |= {"life": 1}
    if place == "evaluation":
        settings |= {"eval__every": 4, "eval__data": "stdlib"}
    if place.startswith("checkpoint"):
        settings["checkpoint__every"] = 5
        point |= {"replicas": [0]}
    summary = run(tmp_path, points, **settings)
    victim = str(point["replicas"][0])  # type: ignore[index]
    assert summary["replicas"][victim]["incarnations"] == (3 if place == "fetch" else 2), "it did not fail there"
