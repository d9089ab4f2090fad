"""A whole job on the GPU data plane: a replica is killed and heals, and a replay on the CPU has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_hsdp.launch.run.directory import read_jsonl
from ft_hsdp.launch.run.replay import replay
from tests.support.launch.launch_helpers import train


@pytest.mark.proof
@pytest.mark.multiproc
def test_a_staged_job_loses_a_replica_and_heals(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
    run = train(
        tmp_path,
        "tests.support.launch.staged_trainer:main",
        replicas=2,
        ranks_per_replica=1,
        train={"steps": 14, "seq_len": 32, "micro_batch": 2},
        model={"dim": 32, "layers": 2, "heads": 2},
        chaos=[{"at_step": 5, "replicas": [1]}],
    )
    logs = [(run.path / "replicas" / str(n) / "rank0.log").read_text() for n in (0, 1)]
    assert [log.count("staged\n") for log in logs] == [1, 2]
    assert any(e["event"] == "FetchCompleted" for e in read_jsonl(run.replica_events(1)))
    verdict = replay(run)
    assert verdict.equal, str(verdict)
