"""Real jobs whose replicas, lives or runs have different data: refused by name, and the healthy ones go on."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.scenarios.scenario_job import ROOT, Job, check
from tests.support.started_job import StartedJob

LOOP = ROOT / "tests" / "support" / "train" / "other_data_loop.py"
TWO: dict[str, Any] = {"replicas": 2, "ranks_per_replica": 1}
TEXT = b"All happy families are alike; each unhappy family is unhappy in its own way. "


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
def test_a_replica_that_comes_back_with_other_data_harms_nobody(tmp_path: Path) -> None:
    settings = {**TWO, "args": ["LATER"], "restart__budget": 1, "checkpoint__every": 0}
    with Job(tmp_path, 60, entry=str(LOOP), **settings) as job:
        job.until(lambda: both(job) >= 5, "step 5")
        job.signal(1, 0, signal.SIGKILL)
        job.until(lambda: job.events("AskRefused", replica=1), "it is refused")
        job.hurry()
        summary = job.end(75)
        assert summary["lost"] == [1]
        assert "data: length is 159" in job.tail()
        assert summary["steps"] == 60


@pytest.mark.soak
def test_text_that_grew_is_refused_until_other_data_are_allowed(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(1000 * TEXT)
    settings = {**TWO, "data__path": str(text), "checkpoint__dir": str(tmp_path / "kept"), "checkpoint__every": 4}
    with Job(tmp_path, 4, **settings) as job:
        check(job.end(), 4)
    text.write_bytes(1001 * TEXT)
    (tmp_path / "runs" / "job").rename(tmp_path / "runs" / "first")
    with Job(tmp_path, 8, **settings) as job:
        assert job.process.wait(240) == 64
        assert "data: length: got '77077'; allowed: 77000" in job.tail()
        assert "data.resume: other" in job.tail()
    with Job(tmp_path, 8, data__resume="other", **settings) as job:
        check(job.end(), 8)
        begun = job.rows("metrics.jsonl")[0]
        assert begun["step"] == 5
        rows = job.rows("replicas/0/commits.jsonl")
        assert [c["index"] for c in rows[0]["contributions"]] == [0, 0], "the new text is read from its beginning"
        assert job.replayed()["equal"]


@pytest.mark.soak
def test_text_of_the_same_name_and_size_is_compared(tmp_path: Path) -> None:
    """Each replica is started in a folder of its own, and has a text of its own there."""
    config = tmp_path / "config.yaml"
    shared = {"job.name": "job", "job.runs_dir": str(tmp_path / "runs"), "data.path": "text.txt"}
    shared |= {"replicas": 2, "ranks_per_replica": 1, "train.steps": 4, "train.seq_len": 32, "model.dim": 64}
    shared |= {"model.layers": 2, "model.heads": 2}
    config.write_text("{}\n")
    overrides = [f"--{key}={json.dumps(value)}" for key, value in shared.items()]

    def command(name: str, *more: str) -> list[str]:
        return [sys.executable, str(ROOT / "launcher.py"), name, str(config), *overrides, *more]

    run = tmp_path / "runs" / "job"
    codes = []
    with StartedJob(command("lighthouse"), tmp_path, run, tmp_path / "lighthouse.log"):
        jobs = []
        for replica, word in enumerate((b"happy", b"sorry")):
            folder = tmp_path / str(replica)
            folder.mkdir()
            (folder / "text.txt").write_bytes(1000 * TEXT + word + 1000 * TEXT)
            more = ["--replica", str(replica)]
            jobs.append(StartedJob(command("replica", *more), folder, run, folder / "log"))
        with jobs[0], jobs[1]:
            while None in codes or not codes:
                codes = [job.process.poll() for job in jobs]
                if 64 in codes:
                    break
        said = "".join(job.log.read_text() for job in jobs)
        assert "data: text is" in said


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
