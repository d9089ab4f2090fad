"""What `job.optimizer` accepts and refuses, in a job of one rank that has not checked in yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import Config, parse
from ft_hsdp.core.incarnation import IncarnationId
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.identity import FromEnvironment, RankPlace
from ft_hsdp.train.job import Job
from ft_hsdp.train.runtime import leader_settings
from tests.support.state.odd_model import Odd


@pytest.fixture
def job(mesh: DeviceMesh, tmp_path: Path) -> Iterator[Job]:
    assert mesh.size() == 1
    place = RankPlace(0, 1, tmp_path, ("http://127.0.0.1:1",), "t", "127.0.0.1", True)
    made = Job(Config(replicas=2, ranks_per_replica=1), place, FromEnvironment(0), None, torch.device("cpu"))
    yield made
    made._sharded.clear()


def shard(job: Job) -> Odd:
    model = Odd(0)
    job.shard(model, list(model.parts))
    return model


def test_a_second_optimizer_is_refused(job: Job) -> None:
    model = shard(job)
    job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"job.optimizer: got 'SGD'; allowed: one optimizer; AdamW is there"):
        job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_of_other_parameters_is_refused(job: Job) -> None:
    shard(job)
    with pytest.raises(ConfigError, match=r"parameters of the model that job.shard returned \(\d+ are others\)"):
        job.optimizer(torch.optim.AdamW(Odd(0).parameters(), lr=0.1))


def test_a_scheduler_that_is_attached_later_is_refused_before_the_first_batch(job: Job) -> None:
    model = shard(job)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    job.optimizer(adam)
    torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0)
    with pytest.raises(ConfigError, match="torch learning rate scheduler"):
        next(job.batches(None))  # type: ignore[arg-type]


def test_a_rate_that_the_loop_sets_is_refused_before_the_vote(job: Job) -> None:
    model = shard(job)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    optim = job.optimizer(adam)
    adam.param_groups[0]["lr"] = 0.2
    job._feeding = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="learning rates"):
        optim.step()


def test_state_that_was_loaded_is_what_the_job_holds(job: Job) -> None:
    model = shard(job)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    adam.step()
    adam.zero_grad()
    job.optimizer(adam)
    live = [v for state in adam.state.values() for v in state.values()]
    assert {id(t) for t in live} == {id(t) for t in job._live_state.optim.values()}
    assert all(float(state["step"]) == 1 for state in adam.state.values())


def test_under_torchrun_everything_is_known_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    calling = FromEnvironment(3)
    assert calling.poll() == calling.wait() == IncarnationId(3, "abc", 2)
    assert str(calling.wait()) == "3-abc-2"


def test_without_torchrun_it_is_the_first_incarnation_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert str(FromEnvironment(0).wait()) == "0-run-0"


def test_only_a_replica_s_first_life_gives_up_on_a_lighthouse_that_does_not_answer() -> None:
    config = parse({"timeouts": {"reach_s": 7}, "ranks_per_replica": 3})
    first, later = leader_settings(config, restarted=False), leader_settings(config, restarted=True)
    assert (first.join_timeout_s, later.join_timeout_s) == (7.0, None)
    assert (first.reach_s, later.reach_s, first.ranks) == (7.0, 7.0, 3)
