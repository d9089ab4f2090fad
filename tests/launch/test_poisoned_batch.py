"""A batch whose gradient is never finite, in a real job: it is left out of some steps, then given up."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from poisoned_trainer import POISON

from ft_hsdp.config import parse
from ft_hsdp.launch.job import Job
from ft_hsdp.launch.lighthouse_process import furnish
from ft_hsdp.launch.local import here, prepare_data
from ft_hsdp.launch.rundir import RunDir, claim, identity, read_json, read_jsonl, write_json
from ft_hsdp.launch.terminal import Terminal

STEPS, RETRIES = 12, 2
SETTINGS = {
    "replicas": 2,
    "ranks_per_replica": 1,
    "train": {"steps": STEPS, "poison_retries": RETRIES},
    "optim": {"clip": None},
    "data": {"max_bytes": 200_000},
}


@pytest.mark.proof
@pytest.mark.multiproc
def test_a_batch_that_is_never_finite_is_given_up(tmp_path: Path) -> None:
    config = parse({"job": {"name": "poison", "runs_dir": str(tmp_path)}, **SETTINGS})
    run = RunDir(tmp_path / "poison")
    prepare_data(config)
    claim(run)
    furnish(run, config)
    write_json(run.supervisor, identity())
    with Terminal(config, io.StringIO()) as terminal:
        job = Job(config, run, terminal, here(config, run, entry="poisoned_trainer:main"))
        code, _ = asyncio.run(asyncio.wait_for(job.run(), 120.0))
    assert code == 0
    summary = read_json(run.path / "summary.json")
    assert summary is not None
    assert len({s["digest"] for s in summary["replicas"].values()}) == 1
    assert {s["incarnations"] for s in summary["replicas"].values()} == {1}, "nobody was ended for it"
    batches = summary["batches"]
    assert (batches["duplicated"], batches["skipped"], batches["given_up"]) == (0, 0, 1)
    rows = read_jsonl(run.path / "metrics.jsonl")
    assert sum(row["contributors"] == [0] for row in rows) == RETRIES
    assert rows[-1]["contributors"] == [0, 1], "replica 1 has gone on to its next batch"
    for replica in (0, 1):
        (event,) = [e for e in read_jsonl(run.replica_events(replica)) if e["event"] == "BatchGivenUp"]
        assert (event["shard"], event["index"]) == POISON
