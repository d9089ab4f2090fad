"""A job of one replica hangs where nobody else sees it: before check-in, in a stopped rank, and altogether."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from ft_hsdp.config import parse
from ft_hsdp.launch.job import Job
from ft_hsdp.launch.lighthouse_process import furnish
from ft_hsdp.launch.local import here, prepare_data
from ft_hsdp.launch.rundir import RunDir, claim, identity, read_json, read_jsonl, write_json
from ft_hsdp.launch.terminal import Terminal

DEADLINE_S = 150.0
SETTINGS = {
    "replicas": 1,
    "ranks_per_replica": 2,
    "train": {"steps": 8},
    "optim": {"clip": None},
    "data": {"max_bytes": 200_000},
    "ftar": {"timeout_s": 4.0},
    "timeouts": {"connect_s": 1.0, "evict_s": 2.0, "start_s": 8.0, "ranks_s": 8.0, "agent_s": 8.0, "step_s": 4.0},
}


@pytest.mark.proof
@pytest.mark.multiproc
def test_a_job_of_one_replica_survives_each_kind_of_hang(tmp_path: Path) -> None:
    config = parse({"job": {"name": "lone", "runs_dir": str(tmp_path)}, **SETTINGS})
    run = RunDir(tmp_path / "lone")
    prepare_data(config)
    claim(run)
    furnish(run, config)
    write_json(run.supervisor, identity())
    with Terminal(config, io.StringIO()) as terminal:
        job = Job(config, run, terminal, here(config, run, entry="lone_trainer:main"))
        code, _ = asyncio.run(asyncio.wait_for(job.run(), DEADLINE_S))
    assert code == 0
    summary = read_json(run.path / "summary.json")
    assert summary is not None
    assert (summary["steps"], summary["replicas"]["0"]["incarnations"]) == (8, 5)
    events = read_jsonl(run.path / "events.jsonl")
    exited = [e["reason"] for e in events if e["event"] == "ReplicaExited"]
    assert "rank 1 has been stopped for" in exited[0]
    assert "has not checked in within 8 s" in exited[1] or "ended with exit" in exited[1]
    ended = [e["reason"] for e in events if e["event"] == "RankEnded"]
    assert any("rank 1 of this replica has given no sign of life" in why for why in ended), ended
    assert any("the trainer hangs: it has not got on" in why for why in ended), ended
