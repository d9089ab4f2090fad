"""A whole job ends and another one goes on from its checkpoint, on other numbers of replicas and ranks."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.scenarios.scenario_job import Job, check

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"checkpoint__every": 5, "checkpoint__keep": 9, "checkpoint__dir": str(folder / "checkpoints"), **more}


def trained(job: Job) -> list[int]:
    """The batches of the whole data that a run's commits hold."""
    shards = len({c["shard"] for r in job.rows("replicas/0/commits.jsonl") for c in r["contributions"]})
    rows = job.rows("metrics.jsonl")
    steps = {r["step"]: r for n in range(3) for r in job.rows(f"replicas/{n}/commits.jsonl")}
    return [c["index"] * shards + c["shard"] for r in rows for c in steps[r["step"]]["contributions"]]


def test_on_other_numbers_of_replicas_and_ranks(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with Job(one, 12, **settings(tmp_path, replicas=2)) as job:
        check(job.end(), 12)
        before = trained(job)
    more = {"replicas": 3, "ranks_per_replica": 1, "train.micro_batch": 4, "data.assignment": "global"}
    with Job(two, 40, **settings(tmp_path), **{k.replace(".", "__"): v for k, v in more.items()}) as job:
        job.until(lambda: job.step() >= 16, "step 16")
        job.signal(1, 0, signal.SIGKILL)
        check(job.end(), 40)
        assert [r["step"] for r in job.rows("metrics.jsonl")] == list(range(13, 41))
        assert {e["step"] for e in job.events("StateRestored") if e["origin"] != "agent"} == {12}
        after = trained(job)
        assert not set(before) & set(after), "a batch was trained by both jobs"
        assert job.replayed()["equal"]


@pytest.mark.soak
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with Job(one, 10, **settings(tmp_path)) as job:
        check(job.end(), 10)
    (newest,) = (tmp_path / "checkpoints").glob("step-10-*")
    file = newest / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with Job(two, 15, **settings(tmp_path)) as job:
        check(job.end(), 15)
        assert {e["step"] for e in job.events("StateRestored")} == {5}
        assert {e["checkpoint"] for e in job.events("CheckpointPassedOver")} == {newest.name}
        assert job.replayed()["equal"]
