from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.jobs import Kill, Setup, job_config
from benchmarks.results import ProgressLog
from benchmarks.returns import SETUPS, back, returns, stages_in
from benchmarks.training import RandomTokens, make_model
from ft_hsdp.config import load
from ft_hsdp.train.model import ModelArgs
from ft_hsdp.train.trainer import build

KILL = Kill(10.0, 1, 0, "1-a-0")
PARTS = {"exit": 0.1, "start": 0.2, "warm-up": 0.3, "check-in": 0.1, "grant": 0.1, "fetch": 0.1, "step": 0.6}


def commit(t: float, incarnation: str, role: str = "contribute") -> dict[str, Any]:
    return {"t": t, "incarnation": incarnation, "role": role}


def event(t: float, name: str, replica: int = 1, **facts: Any) -> dict[str, Any]:
    incarnation = "1-a-0" if t < 10.2 else "1-a-1"
    return {"t": t, "event": name, "replica": replica, "incarnation": incarnation, **facts}


ROWS = [
    commit(9.9, "1-a-0"),
    commit(10.01, "1-a-0"),  # of another rank than the one that was killed
    commit(11.5, "1-a-1", "behind"),
    commit(12.0, "1-a-1"),
]
EVENTS = [
    event(9.0, "ReplicaStarted", how="cold"),
    event(10.1, "ReplicaExited"),
    event(10.3, "ReplicaStarted", how="from a spare"),
    event(10.4, "ReplicaWarmed", replica=0),
    event(10.6, "ReplicaWarmed"),
    event(10.7, "CheckedIn"),
    event(10.8, "GrantAdopted"),
    event(10.9, "FetchCompleted"),
    event(11.9, "GrantAdopted"),
]
STAGES = stages_in(EVENTS)


def test_a_victim_is_back_with_the_first_commit_of_its_next_life() -> None:
    found = back(KILL, ROWS, STAGES, 0.4)
    assert found is not None
    assert (found.commit_s, found.less_one_s, found.contribute_s) == pytest.approx((1.5, 1.1, 2.0))
    assert found.how == "from a spare"
    assert found.phases == pytest.approx(PARTS)
    assert back(KILL, ROWS[:3], STAGES, 0.4) is None  # it never contributed again
    assert back(KILL, ROWS[:2], STAGES, 0.4) is None


def test_all_contenders_train_the_same_model(tmp_path: Path) -> None:
    """That of the quickstart, at its size; and data with which it can be trained."""
    quickstart = load(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
    setup = Setup(**asdict(SETUPS["2 M parameters"]))
    config = job_config(setup, tmp_path)
    made = make_model(setup, config)
    assert isinstance(made.args, ModelArgs)
    assert made.args == build(quickstart).args
    torch.manual_seed(1)
    data = RandomTokens(config)
    assert made(data.batch(0, 0, 0)).isfinite()
    tokens, targets = data.batch(1, 2, 0)
    assert tokens.shape == (quickstart.train.micro_batch, quickstart.train.seq_len)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    waits = make_model(SETUPS["waiting"], config)
    assert sum(p.numel() for p in waits.parameters()) == 2 << 17


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_victim_of_each_contender_comes_back() -> None:
    setup = Setup(replicas=2, layers=1, elements=256, wait_s=0.02)
    (row,) = returns(1, ProgressLog(io.StringIO()), {"waiting": setup})
    assert list(row["contenders"]) == ["warm", "cold", "torchft"]
    assert row["contenders"]["warm"]["starts"] == {"from a spare": 1}
    assert row["contenders"]["cold"]["starts"] == {"cold": 1}
    for found in row["contenders"].values():
        assert found["kills"] == 1
        assert found["contribute"]["p50_ms"] >= found["commit"]["p50_ms"] > found["less_one"]["p50_ms"]
        parts = sum(span["p50_ms"] for span in found["phases"].values())
        assert parts == pytest.approx(found["commit"]["p50_ms"], abs=0.01)
    assert row["contenders"]["torchft"]["phases"]["imports"]["p50_ms"] > 0
    assert row["contenders"]["cold"]["phases"]["warm-up"]["p50_ms"] > 0
