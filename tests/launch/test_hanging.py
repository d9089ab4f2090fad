"""A trainer that hangs while its process lives: its rank ends itself, and a new one takes its place."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from hanging_trainer import VICTIM

from ft_hsdp.config import parse
from ft_hsdp.launch.job import Job
from ft_hsdp.launch.lighthouse_process import furnish
from ft_hsdp.launch.local import here, prepare_data
from ft_hsdp.launch.rundir import RunDir, claim, identity, read_json, read_jsonl, write_json
from ft_hsdp.launch.terminal import Terminal

DEADLINE_S = 180.0
SETTINGS = {
    "replicas": 3,
    "ranks_per_replica": 1,
    "train": {"steps": 25},
    "optim": {"clip": None},
    "data": {"max_bytes": 200_000},
    "ftar": {"timeout_s": 1.0},
    "timeouts": {"connect_s": 1.0},
}


@pytest.mark.proof
@pytest.mark.multiproc
def test_a_trainer_that_hangs_is_replaced(tmp_path: Path) -> None:
    config = parse({"job": {"name": "hanging", "runs_dir": str(tmp_path)}, **SETTINGS})
    run = RunDir(tmp_path / "hanging")
    prepare_data(config)
    claim(run)
    furnish(run, config)
    write_json(run.supervisor, identity())
    with Terminal(config, io.StringIO()) as terminal:
        job = Job(config, run, terminal, here(config, run, entry="hanging_trainer:main"))
        code, _ = asyncio.run(asyncio.wait_for(job.run(), DEADLINE_S))
    assert code == 0
    summary = read_json(run.path / "summary.json")
    assert summary is not None
    lives = {int(r): s["incarnations"] for r, s in summary["replicas"].items()}
    assert lives == {0: 1, VICTIM: 2, 2: 1}, "only the one that hangs is started again"
    events = [e for r in lives for e in read_jsonl(run.path / "replicas" / str(r) / "events.jsonl")]
    (ended,) = [e for e in events if e["event"] == "RankEnded" and e["reason"].startswith("the trainer hangs")]
    assert (ended["replica"], ended["code"]) == (VICTIM, 75)
    broken = [e for e in events if e["event"] == "RingBroken" and e["replica"] != VICTIM]
    assert {e["suspect"] for e in broken[:2]} == {VICTIM}
