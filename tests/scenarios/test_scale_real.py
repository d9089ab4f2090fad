"""A real job is scaled up and down while it trains: no ring breaks, no batch is trained twice or left out."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from ft_hsdp.launch import admin
from ft_hsdp.launch.run.directory import RunDir
from tests.support.aborted import aborted
from tests.support.scenarios.scenario_job import Job

pytestmark = pytest.mark.multiproc

STEPS = 200  # they must last until all has been scaled, on a fast machine, too: that takes about 75 here
ELASTIC = {
    "replicas": 2,
    "max_replicas": 3,
    "ranks_per_replica": 1,
    "lr__intervention": "linear",
    "state__snapshot": "on_demand",
}


def scale(job: Job, replicas: int) -> str:
    return admin.order(RunDir(job.run), "scale", reason="a test", replicas=replicas)


def all_train(job: Job, *replicas: int) -> None:
    job.until(lambda: job.contributing() == set(replicas), f"replicas {replicas} contribute")
    goal = job.step() + 10
    job.until(lambda: job.step() >= goal, f"step {goal}")


@pytest.mark.parametrize("assignment", ["per_replica", pytest.param("global", marks=pytest.mark.soak)])
def test_two_three_one_two(tmp_path: Path, assignment: str) -> None:
    with Job(tmp_path, STEPS, **ELASTIC, data__assignment=assignment) as job:
        all_train(job, 0, 1)
        assert scale(job, 3) == "replica 2 may take part: their supervisors start them"
        all_train(job, 0, 1, 2)
        assert scale(job, 1) == "replica 1,2 leaves at the next step boundary, if it runs, and stays away"
        all_train(job, 0)
        assert scale(job, 2) == "replica 1 may take part: their supervisors start them"
        all_train(job, 0, 1)
        summary = job.end()
    ends = summary["replicas"]
    assert ends["0"]["digest"] == ends["1"]["digest"] != ends["2"]["digest"] == ""
    assert (summary["batches"]["duplicated"], summary["batches"]["skipped"]) == (0, 0)
    assert [summary["failures"], summary.get("lost")] == [[], None]
    assert aborted(job.rows("events.jsonl")) == []
    assert [e["replicas"] for e in job.events("JobScaled")] == [3, 1, 2]
    rows = job.rows("replicas/0/commits.jsonl")
    assert all(r["lr_scale"] == pytest.approx(len(r["contributors"]) / r["total"]) for r in rows)
    sizes = [size for size, _ in groupby((len(r["contributors"]), r["total"]) for r in rows)]
    in_order = iter(sizes)
    assert all(size in in_order for size in [(2, 2), (3, 3), (1, 1), (2, 2)]), sizes
    assert set(sizes) <= {(2, 2), (2, 3), (3, 3), (1, 1), (1, 2)}
    assert job.replayed()["equal"]
