from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.run.recorder import commits_of
from tests.support.scenarios.scenario_job import Job

RANKS, AT = 2, 5  # AT: the step of the loss
CONSTANT = {"quorum__batch": "constant", "restart__budget": 20}
SAME_STEP = {**CONSTANT, "quorum__refill": "same_step"}
GLOBAL = {"data__assignment": "global"}
THIN = {"ranks_per_replica": 1, "train__micro_batch": 1}


def kill(place: str, replica: int, step: int = AT, rank: int = 0) -> dict[str, Any]:
    return {place: {"replicas": [replica], "rank": rank, "step": step}}


def ended(job: Job, steps: int, fewer: Callable[[Row], bool] = lambda row: False) -> list[Row]:
    """The canonical commits of a job that ended well: each step has the wanted units, but for those named.

    The first step of a replica that returns may have more: the others had trained their larger shares already.
    No unit was trained twice, none was skipped, and a replay has the same bits.
    """
    job.ends_well(steps)
    rows = commits_of(RunDir(job.run.resolve()))
    more = {b["step"] for a, b in pairwise(rows) if set(b["contributors"]) > set(a["contributors"])}
    other = [row for row in rows if row["units"] < row["units_wanted"] and not fewer(row)]
    other += [row for row in rows if row["units"] > row["units_wanted"] and row["step"] not in more]
    assert not other, (other, [(e["epoch"], e["reason"]) for e in job.events("EpochGranted")])
    assert all(row["units"] == sum(c["units"] for c in row["contributions"]) for row in rows)
    return rows


@pytest.mark.proof
def test_a_loss_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """With next_step its step alone has fewer units: those of the survivors."""
    settings = {**CONSTANT, "train__accumulate": 2, "train__precision": "bfloat16"}
    with Job(tmp_path, 15, **settings, debug__failpoints=kill("vote", 1, rank=1)) as job:
        rows = ended(job, 15, lambda row: row["step"] == AT)
    assert rows[AT - 1]["contributors"] == [0, 2]
    assert rows[AT - 1]["units"] == 2 * 2 * RANKS
    assert {c["part"] for c in rows[AT - 1]["contributions"]} == {0}
    assert rows[AT - 1]["lr_scale"] == pytest.approx((2 / 3) ** 0.5)
    assert rows[AT]["units"] == rows[AT]["units_wanted"]


@pytest.mark.proof
def test_a_second_loss_before_the_refill(tmp_path: Path) -> None:
    """Two of four train the units of all; nobody trains a unit that another one has trained and lives."""
    points = kill("reduce-scatter", 1) | kill("refill", 0)
    fixed = {**SAME_STEP, **THIN, **GLOBAL, "replicas": 4, "train__accumulate": 2}
    with Job(tmp_path, 15, **fixed, debug__failpoints=points) as job:
        rows = ended(job, 15)
    assert rows[AT - 1]["contributors"] == [2, 3]
    assert rows[AT - 1]["units"] == 4 * 2
    assert {c["part"] for c in rows[AT - 1]["contributions"]} > {0}


@pytest.mark.proof
def test_the_quotas_follow_a_replica_that_returns_and_is_lost_again(tmp_path: Path) -> None:
    steps = 45
    chaos = [
        {"at_step": 6, "replicas": [1], "rank": 0, "down_steps": 4},
        {"at_step": 25, "replicas": [2], "rank": 1, "down_steps": 4},
    ]
    with Job(tmp_path, steps, **SAME_STEP, **GLOBAL, train__accumulate=2, chaos=chaos) as job:
        rows = ended(job, steps)
    seen = {tuple(row["contributors"]) for row in rows}
    assert seen >= {(0, 2), (0, 1), (0, 1, 2)}


@pytest.mark.proof
def test_one_that_stands_by_is_promoted_when_a_contributor_is_lost(tmp_path: Path) -> None:
    """Of 3 healthy replicas 2 contribute. All hold the same state, so the third one takes over at once."""
    steps = 45
    chaos = [
        {"at_step": 5, "replicas": [3], "rank": 0, "down_steps": 10},
        {"at_step": 9, "replicas": [1], "rank": 0, "down_steps": 6},
    ]
    settings = {**SAME_STEP, **THIN, "replicas": 4, "quorum__allowed": [1, 2, 4], "train__accumulate": 2}
    with Job(tmp_path, steps, **settings, chaos=chaos) as job:
        rows = ended(job, steps)
        roles = [tuple(sorted(e["roles"].items())) for e in job.events("EpochGranted")]
    assert {len(row["contributors"]) for row in rows} == {2, 4}
    assert any(("2", "standby") in each for each in roles)
    seen = [row["contributors"] for row in rows]
    assert seen.index([0, 1]) < seen.index([0, 2])
    assert seen[0] == seen[-1] == [0, 1, 2, 3]
