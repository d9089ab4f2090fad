"""A rank of a real job has no descriptor left when a new ring is formed: it ends, and no other is left out."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from full_trainer import VICTIM

from ft_hsdp.config import parse
from ft_hsdp.launch.job import Job
from ft_hsdp.launch.lighthouse_process import furnish
from ft_hsdp.launch.local import here, prepare_data
from ft_hsdp.launch.rundir import RunDir, claim, identity, read_json, read_jsonl, write_json
from ft_hsdp.launch.terminal import Terminal

DEADLINE_S = 120.0
SETTINGS = {
    "replicas": 3,
    "ranks_per_replica": 1,
    "train": {"steps": 40},
    "optim": {"clip": None},
    "data": {"max_bytes": 200_000},
    "ftar": {"transport": "tcp"},
    "chaos": [{"at_step": 8, "replicas": [2]}],
}


@pytest.mark.proof
@pytest.mark.multiproc
def test_a_rank_without_descriptors_is_replaced_and_no_healthy_one_is_left_out(tmp_path: Path) -> None:
    config = parse({"job": {"name": "full", "runs_dir": str(tmp_path)}, **SETTINGS})
    run = RunDir(tmp_path / "full")
    prepare_data(config)
    claim(run)
    furnish(run, config)
    write_json(run.supervisor, identity())
    with Terminal(config, io.StringIO()) as terminal:
        job = Job(config, run, terminal, here(config, run, entry="full_trainer:main"))
        code, _ = asyncio.run(asyncio.wait_for(job.run(), DEADLINE_S))
    assert code == 0
    summary = read_json(run.path / "summary.json")
    assert summary is not None
    lives = {int(r): s["incarnations"] for r, s in summary["replicas"].items()}
    assert lives == {0: 1, VICTIM: 2, 2: 2}, "only the one without descriptors and the killed one start again"
    assert len({s["digest"] for s in summary["replicas"].values()}) == 1
    events = read_jsonl(run.path / "events.jsonl")
    (ended,) = [e for e in events if e["event"] == "RankEnded"]
    assert (ended["replica"], ended["code"]) == (VICTIM, 75)
    assert "RLIMIT_NOFILE" in ended["reason"]
    assert not [e for e in events if e["event"] == "ReplicaExcluded" and e["replica"] == 0]
    blamed = {e["suspect"] for e in events if e["event"] == "RingBroken" and e["replica"] != VICTIM}
    assert 0 not in blamed
    exited = [e for e in events if e["event"] == "ReplicaExited" and e["replica"] == VICTIM]
    assert "RLIMIT_NOFILE" in exited[0]["reason"]
