"""A whole job on the GPU data plane: a replica is killed and heals, and a replay on the CPU has the same bits."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from ft_hsdp.config import parse
from ft_hsdp.launch.job import Job
from ft_hsdp.launch.lighthouse_process import furnish
from ft_hsdp.launch.local import here, prepare_data
from ft_hsdp.launch.replay import replay
from ft_hsdp.launch.rundir import RunDir, claim, identity, read_jsonl, write_json
from ft_hsdp.launch.terminal import Terminal

SETTINGS = {
    "replicas": 2,
    "ranks_per_replica": 1,
    "train": {"steps": 14, "seq_len": 32, "micro_batch": 2},
    "model": {"dim": 32, "layers": 2, "heads": 2},
    "data": {"max_bytes": 200_000},
    "chaos": [{"at_step": 5, "replicas": [1]}],
}


@pytest.mark.proof
@pytest.mark.multiproc
def test_a_staged_job_loses_a_replica_and_heals(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
    config = parse({"job": {"name": "staged", "runs_dir": str(tmp_path)}, **SETTINGS})
    run = RunDir(tmp_path / "staged")
    prepare_data(config)
    claim(run)
    furnish(run, config)
    write_json(run.supervisor, identity())
    with Terminal(config, io.StringIO()) as terminal:
        code, _ = asyncio.run(Job(config, run, terminal, here(config, run, entry="staged_trainer:main")).run())
    assert code == 0
    logs = [(run.path / "replicas" / str(n) / "rank0.log").read_text() for n in (0, 1)]
    assert [log.count("staged\n") for log in logs] == [1, 2]
    assert any(e["event"] == "FetchCompleted" for e in read_jsonl(run.path / "replicas/1/events.jsonl"))
    verdict = replay(run)
    assert verdict.equal, str(verdict)
