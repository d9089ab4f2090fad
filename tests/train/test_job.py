"""What `job.optimizer` accepts and refuses, in a job of one rank that has not checked in yet."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ft_hsdp.config import Config, parse
from ft_hsdp.core.incarnation import IncarnationId
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.data.step_plan import StepPlan
from ft_hsdp.train.identity import FromEnvironment, RankPlace
from ft_hsdp.train.job import Job
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups
from ft_hsdp.train.rank_zero import leader_settings
from ft_hsdp.train.replay.job import ReplayJob
from ft_hsdp.train.state.packing import local
from ft_hsdp.train.step_driver import StepDriver
from tests.support.state.odd_model import Odd, batch


@contextmanager
def made(mesh: DeviceMesh, folder: Path, config: Config) -> Iterator[Job]:
    assert mesh.size() == 1
    place = RankPlace(0, 1, folder, ("http://127.0.0.1:1",), "t", "127.0.0.1", True)
    job = Job(config, place, FromEnvironment(0), None, torch.device("cpu"))
    yield job
    if hasattr(job, "_adopted"):
        job._adopted.clear()


@pytest.fixture
def job(mesh: DeviceMesh, tmp_path: Path) -> Iterator[Job]:
    with made(mesh, tmp_path, Config(replicas=2, ranks_per_replica=1)) as job:
        yield job


@pytest.fixture
def weighing(mesh: DeviceMesh, tmp_path: Path) -> Iterator[Job]:
    config = parse({"replicas": 2, "ranks_per_replica": 1, "data": {"weight": "tokens"}})
    with made(mesh, tmp_path, config) as job:
        yield job


def shard(job: Job) -> Odd:
    model = Odd(0)
    job.shard(model, list(model.parts))
    return model


def driver(job: Job) -> StepDriver:
    """The driver of a job's steps, which is made with the optimizer."""
    if job._driver is None:
        job.optimizer(torch.optim.SGD(list(job._adopted.params.values()), lr=0.1))
    assert job._driver is not None
    return job._driver


def test_a_second_optimizer_is_refused(job: Job) -> None:
    model = shard(job)
    job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"got 'SGD'; allowed: one call \(AdamW is there\)"):
        job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_several_optimizers_share_the_parameters(job: Job) -> None:
    model = shard(job)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    muon, adam = torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)
    job.optimizer([muon, adam], [torch.optim.lr_scheduler.LinearLR(each) for each in (muon, adam)])
    names = set(job._live_state.optim)
    assert {n.rpartition(".")[2] for n in names} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    assert {n.rpartition(".")[0] for n in names} == set(job._adopted.params)
    assert len(names) == len(matrices) + 3 * len(others)


def test_states_that_were_loaded_into_several_stay(job: Job) -> None:
    model = shard(job)
    parts = [list(model.parts.parameters()), [model.first, model.last]]
    inside = [torch.optim.AdamW(part, lr=0.1) for part in parts]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for each in inside:
        each.step()
        each.zero_grad()
    wanted = {id(t): t.clone() for each in inside for state in each.state.values() for t in state.values()}
    job.optimizer(inside)
    live = job._live_state.optim.values()
    assert {id(t) for t in live} == set(wanted)
    assert all(torch.equal(local(t), local(wanted[id(t)])) for t in live)


def test_a_container_that_calls_itself_an_optimizer_is_what_is_in_it(job: Job) -> None:
    """As that of torchtitan, whose own parameter groups nobody trains."""
    model = shard(job)
    parts = [list(model.parts.parameters()), [model.first, model.last]]
    inside = [torch.optim.AdamW(part, lr=0.1) for part in parts]

    class Container(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(list(model.parameters()), {})

        def __iter__(self) -> Iterator[torch.optim.Optimizer]:
            return iter(inside)

    job.optimizer(Container())
    assert len(job._live_state.optim) == 3 * len(job._adopted.params)


MISTAKES: dict[str, tuple[Callable[[Odd], Any], str]] = {
    "left out": (
        lambda m: torch.optim.AdamW(m.parts.parameters()),
        r"got 'first in no optimizer and 1 more'; allowed: each trainable parameter in exactly one",
    ),
    "twice": (
        lambda m: [torch.optim.AdamW(m.parameters()), torch.optim.SGD([m.last])],
        r"got 'last in 2 optimizers'; allowed: each trainable parameter in exactly one",
    ),
    "no optimizer": (lambda m: [], r"allowed: a torch optimizer, or several"),
    "something else": (lambda m: m, r"allowed: a torch optimizer, or several"),
    "a clip that is no norm": (
        lambda m: torch.optim.AdamW([{"params": m.parameters(), "clip": 0}]),
        r"clip of a parameter group: got 0; allowed: the largest norm",
    ),
    "a value that is not JSON": (
        lambda m: torch.optim.AdamW([{"params": m.parameters(), "scale": lambda step: 1.0}]),
        r"got 'scale of a parameter group'; allowed: numbers and text \(it is a function\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_in_one_line(job: Job, mistake: str) -> None:
    make, said = MISTAKES[mistake]
    model = shard(job)
    with pytest.raises(ConfigError, match=said) as refused:
        job.optimizer(make(model))
    assert "\n" not in str(refused.value)
    job.optimizer(torch.optim.AdamW(model.parameters()))  # nothing of it stays


def test_a_frozen_parameter_may_be_in_an_optimizer_and_gets_no_state() -> None:
    model = Odd(0)
    model.last.requires_grad_(False)
    groups = Groups(torch.optim.AdamW(model.parameters(), lr=0.1))
    names = {id(p): n for n, p in model.named_parameters()}
    groups.check_parameters({n: p for n, p in model.named_parameters() if p.requires_grad})
    groups.check_parameters(dict(model.named_parameters()))
    create_state(groups.optimizers[0])
    assert {n.rpartition(".")[0] for n in groups.tensors(names)} == set(names.values()) - {"last"}


def test_a_scheduler_that_is_too_short_for_the_job_is_refused(job: Job) -> None:
    model = shard(job)
    adam = torch.optim.AdamW(model.parameters())
    cycle = torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=job.config.train.steps - 1)
    with pytest.raises(ConfigError, match=r"OneCycleLR: got 'total_steps .*which is train.steps"):
        job.optimizer(adam, cycle)


def test_an_optimizer_of_other_parameters_is_refused(job: Job) -> None:
    shard(job)
    with pytest.raises(
        ConfigError,
        match=r"parameters of the model that the job took over, trainable ones alone \(\d+ are others\)",
    ):
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
    driver(job).plan = StepPlan(Ledger.empty(1), 0, 1, 1)
    with pytest.raises(ConfigError, match="learning rates"):
        optim.step()


def test_a_step_before_the_first_batch_is_refused(job: Job) -> None:
    model = shard(job)
    optim = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"optim.step comes before the first batch of job.batches"):
        optim.step()


def test_a_weight_is_refused_where_units_count(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"job.weigh: got 5; allowed: no call, unless data.weight is tokens"):
        job.weigh(5)


def test_the_gradient_of_a_micro_batch_is_multiplied_by_its_weight(weighing: Job) -> None:
    """Before the first batch nothing is: a warm-up may weigh as the loop does."""
    model = shard(weighing)
    weighing.weigh(7)
    with pytest.raises(ConfigError, match=r"job.weigh: got -1"):
        weighing.weigh(-1)
    model(batch(0)).backward()
    once = {n: p.grad.full_tensor().clone() for n, p in weighing._adopted.params.items()}
    weighing._adopted.clear()
    plan = driver(weighing).plan = StepPlan(Ledger.empty(1), 0, 1, 1, ((0, 1),), weighs=True)
    with torch.no_grad():
        model(batch(1))  # before anything was fed
    plan.begin()
    loss = model(batch(0))
    with pytest.raises(ConfigError, match=r"job.weigh: got None"):
        loss.backward()
    weighing._adopted.clear()
    loss = model(batch(0))
    weighing.weigh(4)
    with torch.no_grad():
        model(batch(1))  # an evaluation is not what is trained
    loss.backward()
    assert plan.trained[-1].loss == float(loss.detach())
    assert [c.weight for c in plan.contributions(0)] == [4]
    for name, param in weighing._adopted.params.items():
        assert torch.equal(param.grad.full_tensor(), 4 * once[name]), name


@pytest.mark.parametrize("form", [lambda loss: loss, lambda loss: {"loss": loss, "logits": torch.ones(3)}])
def test_the_loss_is_what_the_model_returns_or_calls_so(job: Job, form: Callable[[torch.Tensor], Any]) -> None:
    shard(job)
    plan = driver(job).plan = StepPlan(Ledger.empty(1), 0, 1, 1, ((0, 1),))
    plan.begin()
    output = form(torch.tensor(2.5, requires_grad=True))
    assert job._returned(torch.nn.Identity(), (), output) is output, "where units count, nothing is weighed"
    assert plan.trained[-1].loss == 2.5


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
    first, later = (leader_settings(config, 3, restarted=again) for again in (False, True))
    assert (first.join_timeout_s, later.join_timeout_s) == (7.0, None)
    assert (first.reach_s, later.reach_s, first.ranks) == (7.0, 7.0, 3)


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


def test_ranks_that_train_together_have_one_data_rank(tmp_path: Path) -> None:
    config = parse({"replicas": 2, "ranks_per_replica": 6, "ranks_per_unit": 2})
    for rank in range(6):
        place = RankPlace(rank, 6, tmp_path, ("http://127.0.0.1:1",), "t", "127.0.0.1", True)
        job = Job(config, place, FromEnvironment(0), None, torch.device("cpu"))
        assert (job.data_rank, job.data_ranks) == (rank // 2, 3)
        assert job.loader(Numbers(), 1).steps_per_epoch == 40 // 2 // 3


def test_a_loader_has_the_jobs_shape_and_seed(mesh: DeviceMesh, tmp_path: Path) -> None:
    config = parse({"replicas": 2, "ranks_per_replica": 1, "train": {"seed": 5, "accumulate": 2}})
    with made(mesh, tmp_path, config) as job:
        assert (job.data_rank, job.data_ranks) == (0, 1)
        loader = job.loader(Numbers(), 4, persistent_workers=True)
        assert loader.steps_per_epoch == 40 // 4 // 2 // 2
        samples = [
            s for i in range(2) for shard in range(2) for m in (0, 1) for s in loader.samples_of(shard, i, 0, m)[1]
        ]
        assert len(set(samples)) == 32
        assert loader.samples_of(0, 0, 0) == job.loader(Numbers(), 4, seed=5).samples_of(0, 0, 0)
        assert loader.samples_of(0, 0, 0) != job.loader(Numbers(), 4, seed=6).samples_of(0, 0, 0)
        with pytest.raises(ConfigError, match="one step reads 4 batches, and an epoch has 2"):
            job.loader(Numbers(), 20)
        with pytest.raises(ConfigError, match=r"^job.loader\(sampler\): got 1; allowed: shuffle, or"):
            job.loader(Numbers(), 4, sampler=1)
        with pytest.raises(ConfigError, match=r"a call after job.optimizer"):
            next(iter(loader))
        with pytest.raises(ConfigError, match=r"a call after job.optimizer"):
            next(iter(job.stream([1])))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([nn.Linear(4, 4)], "each rank has a row (rank 2 of 3 would have none)"),
        ([nn.Linear(4, 12), nn.BatchNorm1d(12)], "null with batch_norm"),
    ],
)
def test_a_model_that_lanes_cannot_sum_is_refused(
    mesh: DeviceMesh, tmp_path: Path, parts: list[nn.Module], why: str
) -> None:
    """With one replica there are no lanes, and nothing is refused."""
    lone = parse(
        {"replicas": 1, "ranks_per_replica": 6, "hosts": {"per_replica": 2}, "memory": {"shrink_to": 2}},
    )
    for replicas in (1, 2):
        with made(mesh, tmp_path, lone.model_copy(update={"replicas": replicas})) as job:
            model = nn.Sequential(*copy.deepcopy(parts))
            fully_shard(model, mesh=mesh)
            if replicas == 1:
                job.adopt(model, batch_norm="mean")
                continue
            with pytest.raises(ConfigError, match=re.escape(why)) as refused:
                job.adopt(model, batch_norm="mean")
            assert refused.value.key == "memory.shrink_to"


def test_a_stream_needs_data_shards_of_the_replicas_own(mesh: DeviceMesh, tmp_path: Path) -> None:
    config = parse({"replicas": 2, "ranks_per_replica": 1, "data": {"assignment": "global"}})
    with (
        made(mesh, tmp_path, config) as job,
        pytest.raises(ConfigError, match=r"^data.assignment: got 'global'; allowed: per_replica, with job.stream"),
    ):
        job.stream([1])


@pytest.mark.parametrize(
    ("assignment", "replica", "expected"),
    [("per_replica", 1, [0, 1, 2, 3, 4]), ("global", 1, [2, 3, 6, 7, 10]), ("global", 0, [0, 1, 4, 5, 8])],
)
def test_what_is_read_ahead_is_what_the_next_steps_take(
    mesh: DeviceMesh, tmp_path: Path, assignment: str, replica: int, expected: list[int]
) -> None:
    config = parse(
        {"replicas": 2, "ranks_per_replica": 1, "train": {"accumulate": 2}, "data": {"assignment": assignment}}
    )
    with made(mesh, tmp_path, config) as job:
        job.optimizer(torch.optim.AdamW(shard(job).parameters(), lr=0.1))
        guessed: list[int] = []

        class Guesses:
            def guess(self, ahead: Any) -> None:
                guessed.extend(at.unit for at in islice(ahead, 5))

        reader: Any = Guesses()
        job._driver.guess(reader, replica)
        assert guessed == expected


def test_after_the_last_step_there_are_no_more_batches(job: Job) -> None:
    """A loop over epochs around the one over batches ends."""
    job.optimizer(torch.optim.AdamW(shard(job).parameters(), lr=0.1))
    assert not job.over
    job._live_state.state = StateId(1, job.config.train.steps, "")
    assert job.over
    assert list(job.batches(job.loader(Numbers()))) == []


def test_a_replay_refuses_a_stream() -> None:
    with pytest.raises(ConfigError, match=r"^replay: got 'a loop over job.stream'; allowed: job.loader"):
        object.__new__(ReplayJob).stream([1])


def test_the_whole_model_is_gathered_as_its_state_dict_names_it(job: Job) -> None:
    shard(job)
    whole = job.full_state_dict()
    assert list(whole) == list(Odd(0).state_dict())
    for name, param in job._adopted.params.items():
        assert type(whole[name]) is torch.Tensor
        assert torch.equal(whole[name], param.full_tensor())


def test_there_is_no_whole_model_before_the_job_has_one(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"job.full_state_dict: got None; allowed: a call after job.shard"):
        job.full_state_dict()
