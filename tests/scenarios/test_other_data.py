"""Real jobs whose replicas, lives or runs have different data: refused by name, and the healthy ones go on."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.scenarios.scenario_job import ROOT, Job, check

LOOP = ROOT / "tests" / "support" / "train" / "other_data_loop.py"
TWO: dict[str, Any] = {"replicas": 2, "ranks_per_replica": 1}


def both(job: Job) -> int:
    """The newest step that both replicas committed."""
    logs = [job.rows(f"replicas/{r}/commits.jsonl") for r in range(2)]
    return min(rows[-1]["step"] if rows else 0 for rows in logs)


def test_a_replica_with_one_sample_less_does_not_train(tmp_path: Path) -> None:
    with Job(tmp_path, 4, entry=str(LOOP), args=["ROWS"], **TWO) as job:
        job.end(64)
        assert "data: length is" in job.tail()
        assert "159" in job.tail()
        assert "160" in job.tail()
        assert job.rows("metrics.jsonl") == []


@pytest.mark.soak
def test_a_stream_that_returns_its_live_state_leaves_nothing_out(tmp_path: Path) -> None:
    with Job(tmp_path, 60, entry=str(LOOP), args=["LIVE"], train__accumulate=4, **TWO) as job:
        job.until(lambda: both(job) >= 20, "step 20")
        job.signal(1, 0, signal.SIGKILL)
        job.until(lambda: len(job.events("ReplicaStarted", replica=1)) == 2, "the second life")
        job.hurry()
        check(job.end(), 60)
        rows = {row["step"]: row for r in range(2) for row in job.rows(f"replicas/{r}/commits.jsonl")}
    fed = [json.loads(line) for line in (tmp_path / "fed-1.jsonl").read_text().splitlines()]
    for step, row in rows.items():
        units = [
            unit
            for c in row["contributions"]
            if c["shard"] == 1
            for unit in range(c["index"], c["index"] + c["units"])
        ]
        got = [each["first"] for each in fed if each["step"] == step][-len(units) :] if units else []
        assert got == [2.0 * unit + 1 for unit in units], step
