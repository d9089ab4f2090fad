from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import adopt
from benchmarks.adopt import KilledJob, example, kill_row
from ft_hsdp.bench.jobs import TRAIN, Setup, job_config
from ft_hsdp.bench.recovery import Stall
from ft_hsdp.bench.results import ProgressLog
from ft_hsdp.config.entry import locate
from ft_hsdp.errors import Retryable


@pytest.mark.parametrize("trainer", adopt.TRAINERS)
def test_the_job_of_an_example_is_that_of_its_configuration(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = example(trainer)
    assert json.loads(json.dumps(setup.sections)) == setup.sections  # as it goes to the job
    config = job_config(setup, tmp_path)
    assert (config.replicas, config.ranks_per_replica, config.job.runs_dir) == (2, 2, str(tmp_path))
    assert config.entry is not None
    monkeypatch.chdir(adopt.ROOT)
    assert locate(config.entry).resolve().parent == adopt.ROOT / "examples" / trainer
    assert config.train.steps == setup.sections["train"]["steps"] >= 60
    whole = ("adapt", "per_replica") if trainer == "torchtitan" else ("constant", "global")
    assert (config.quorum.batch, config.data.assignment) == whole


def job(*less_one_ms: float, twice: int = 0, skipped: int = 0, digests: str = "aa") -> KilledJob:
    stalls = [Stall(ms / 1e3 + 0.1, ms / 1e3, ms / 1e3 + 0.02) for ms in less_one_ms]
    batches = {"trained": 600, "duplicated": twice, "skipped": skipped}
    replicas = {str(n): {"digest": digest} for n, digest in enumerate(digests)}
    return KilledJob(0.1, stalls, {"steps": 150, "batches": batches, "replicas": replicas})


def row(trainer: str, *jobs: KilledJob) -> dict[str, Any]:
    return kill_row(trainer, Setup(replicas=2, ranks=2), jobs)


def test_the_jobs_of_a_trainer_are_summed_up() -> None:
    found = row("fabric", job(10, 30, twice=1), job(20, skipped=2, digests="ab"))
    assert (found["jobs"], found["kills"], found["step_ms"]) == (2, 3, 100.0)
    assert found["less_one"] == {"p50_ms": 20.0, "p99_ms": 30.0, "max_ms": 30.0, "count": 3}
    assert [found[key] for key in ("trained", "twice", "skipped", "differ")] == [1200, 1, 2, 1]
    with pytest.raises(Retryable, match="fabric has too few steps"):
        row("fabric", job())


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.timeout(240)
def test_a_tiny_llama_trains_in_turn_with_hsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch alone, 2 x 2 ranks; each step waits as long as it is told, in both."""
    sections: dict[str, dict[str, Any]] = {
        "train": {**TRAIN, "micro_batch": 1, "seq_len": 8},
        "model": {"dim": 8, "layers": 1, "heads": 1},
        "optim": {"clip": 1.0},
    }
    monkeypatch.setattr(adopt, "interpreter", lambda *_: "")
    monkeypatch.setattr(adopt, "TRANSPORTS", ("shm",))
    setups = {"waiting": Setup(replicas=2, ranks=2, sections=sections, wait_s=0.03)}
    (found,) = adopt.step(2, ProgressLog(io.StringIO()), setups)
    assert {name: crew["count"] for name, crew in found["crews"].items()} == dict.fromkeys(
        ("hsdp", "hsdp again", "ft_hsdp, shm"), 2
    )
    assert min(crew["min_ms"] for crew in found["crews"].values()) > 30
