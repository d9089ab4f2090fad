"""What `job.optimizer` accepts and refuses, in a job of one rank that has not checked in yet."""

import copy
import re
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ft_hsdp.config import Config, parse
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.train.data.sources import OneLoop
from ft_hsdp.train.data.step_plan import StepPlan
from ft_hsdp.train.identity import FromEnvironment, RankPlace
from ft_hsdp.train.job import Job
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups
from ft_hsdp.train.rank_zero import leader_settings
from ft_hsdp.train.replay.job import ReplayJob
from ft_hsdp.train.state.packing import local
from tests.support.refused import refused
from tests.support.state.odd_model import Odd, batch
from tests.support.train.one_rank import OneRank

TWO = Config(replicas=2, ranks_per_replica=1)
WEIGHING = parse({"replicas": 2, "ranks_per_replica": 1, "data": {"weight": "tokens"}})


def made(folder: Path, config: Config, rank: int = 0, ranks: int = 1) -> Job:
    place = RankPlace(rank, ranks, folder, ("http://127.0.0.1:1",), "t", "127.0.0.1", 0)
    return Job(config, place, FromEnvironment(0), None, torch.device("cpu"))


@pytest.fixture
def job(mesh: DeviceMesh, tmp_path: Path) -> Job:
    assert mesh.size() == 1
    return made(tmp_path, TWO)


def shard(job: Job) -> Odd:
    model = Odd(0)
    job.shard(model, list(model.parts))
    return model


def test_several_optimizers_share_the_parameters(job: Job) -> None:
    model = shard(job)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    muon, adam = torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)
    job.optimizer([muon, adam], [torch.optim.lr_scheduler.LinearLR(each) for each in (muon, adam)])
    assert all(set(muon.state[p]) == {"momentum_buffer"} for p in matrices)
    assert all(set(adam.state[p]) == {"exp_avg", "exp_avg_sq", "step"} for p in others)


class Container(torch.optim.Optimizer):
    """An optimizer that holds others, as that of torchtitan: nobody trains its own parameter groups."""

    def __init__(self, inside: list[torch.optim.Optimizer]) -> None:
        super().__init__([p for each in inside for group in each.param_groups for p in group["params"]], {})
        self.inside = inside

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.inside)


@pytest.mark.parametrize("wrapped", [lambda inside: inside, Container], ids=["a list", "a container"])
@pytest.mark.parametrize("count", [1, 2])
def test_state_that_was_loaded_is_what_the_job_holds(job: Job, count: int, wrapped: Callable[[Any], Any]) -> None:
    model = shard(job)
    parts = [list(model.parts.parameters()), [model.first, model.last]]
    parts = parts if count == 2 else [parts[0] + parts[1]]
    inside = [torch.optim.AdamW(part, lr=0.1) for part in parts]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for each in inside:
        each.step()
        each.zero_grad()

    def held() -> dict[int, torch.Tensor]:
        return {id(t): local(t) for each in inside for state in each.state.values() for t in state.values()}

    wanted = {key: t.clone() for key, t in held().items()}
    job.optimizer(wrapped(inside))
    assert held().keys() == wanted.keys()
    assert all(torch.equal(t, wanted[key]) for key, t in held().items())
    assert all(float(state["step"]) == 1 for each in inside for state in each.state.values())


MISTAKES: dict[str, tuple[Callable[[Odd], Any], str]] = {
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
    refused(lambda: job.optimizer(make(model)), said)
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
    refused(lambda: job.optimizer(adam, cycle), r"OneCycleLR: got 'total_steps .*which is train.steps")


def test_a_scheduler_that_is_attached_later_is_refused_before_the_first_batch(job: Job) -> None:
    model = shard(job)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    job.optimizer(adam)
    torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0)
    refused(lambda: next(job.batches(None)), "torch learning rate scheduler")  # type: ignore[arg-type]


def test_a_model_of_too_many_tensors_is_refused_before_the_first_batch(job: Job) -> None:
    job.optimizer(torch.optim.AdamW(shard(job).parameters(), lr=0.1))
    with mock.patch.object(shard_manifest, "MAX_MANIFEST", 1000):
        refused(lambda: next(job.batches(job.loader(torch.arange(64)))), key="job.shard")


def test_a_step_before_the_first_batch_is_refused(job: Job) -> None:
    model = shard(job)
    optim = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"optim.step comes before the first batch of job.batches"):
        optim.step()


def test_a_weight_is_refused_where_units_count_or_if_it_is_none(job: Job, tmp_path: Path) -> None:
    """Before the first batch it has no effect: a warm-up may weigh as the loop does."""
    refused(lambda: job.weigh(5), key="job.weigh")
    weighing = made(tmp_path, WEIGHING)
    weighing.weigh(7)
    refused(lambda: weighing.weigh(-1), key="job.weigh")


def test_the_gradient_of_a_micro_batch_is_multiplied_by_its_weight(mesh: DeviceMesh) -> None:
    one = OneRank(mesh, WEIGHING)
    one.model(batch(0)).backward()
    once = {name: grad.clone() for name, grad in one.gradients().items()}
    one.adopted.clear()
    plan = one.driver.plan = StepPlan(Ledger.empty(1), 0, 1, 1, ((0, 1),), weighs=True)
    with torch.no_grad():
        one.model(batch(1))  # before anything was fed
    plan.begin()
    loss = one.model(batch(0))
    refused(loss.backward, key="job.weigh")
    one.adopted.clear()
    loss = one.model(batch(0))
    plan.trained[-1].weigh(4)
    with torch.no_grad():
        one.model(batch(1))  # an evaluation is not what is trained
    loss.backward()
    assert plan.trained[-1].loss == float(loss.detach())
    assert [c.weight for c in plan.contributions(0)] == [4]
    assert all(torch.equal(grad, 4 * once[name]) for name, grad in one.gradients().items())


def test_a_rate_that_the_loop_sets_is_refused_before_the_vote(mesh: DeviceMesh) -> None:
    one = OneRank(mesh, TWO)
    one.sgd.param_groups[0]["lr"] = 0.2
    one.driver.plan = StepPlan(Ledger.empty(1), 0, 1, 1)
    refused(one.optim.step, "learning rates")


@pytest.mark.parametrize(
    ("torchrun", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"}, IncarnationId(3, "abc", 2)),
        ({}, IncarnationId(3, "run", 0)),
    ],
)
def test_what_torchrun_knows_is_known_from_the_start(monkeypatch, torchrun, expected) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    calling = FromEnvironment(3)
    assert calling.poll() == calling.wait() == expected


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
        job = made(tmp_path, config, rank, 6)
        assert (job.data_rank, job.data_ranks) == (rank // 2, 3)
        assert job.loader(Numbers(), 1).steps_per_epoch == 40 // 2 // 3


def test_a_loader_has_the_jobs_shape_and_seed(tmp_path: Path) -> None:
    config = parse({"replicas": 2, "ranks_per_replica": 1, "train": {"seed": 5, "accumulate": 2}})
    job = made(tmp_path, config)
    assert (job.data_rank, job.data_ranks) == (0, 1)
    loader = job.loader(Numbers(), 4, persistent_workers=True)
    assert loader.steps_per_epoch == 40 // 4 // 2 // 2
    places = [(shard, i, 0, m) for i in range(2) for shard in range(2) for m in (0, 1)]
    assert len({s for at in places for s in loader.samples_of(*at)[1]}) == 32
    assert loader.samples_of(0, 0, 0) == job.loader(Numbers(), 4, seed=5).samples_of(0, 0, 0)
    assert loader.samples_of(0, 0, 0) != job.loader(Numbers(), 4, seed=6).samples_of(0, 0, 0)
    refused(lambda: job.loader(Numbers(), 20), "one step reads 4 batches, and an epoch has 2")
    refused(lambda: job.loader(Numbers(), 4, sampler=1), r"^job.loader\(sampler\): got 1; allowed: shuffle, or")
    refused(lambda: next(iter(loader)), r"a call after job.optimizer")
    refused(lambda: next(iter(job.stream([1]))), r"a call after job.optimizer")


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([nn.Linear(4, 4)], "each rank has a row (rank 2 of 3 would have none)"),
        ([nn.Linear(4, 12), nn.BatchNorm1d(12)], "null with batch_norm"),
    ],
)
def test_a_model_that_lanes_cannot_sum_is_refused(mesh, tmp_path, parts, why) -> None:
    """With one replica there are no lanes, and nothing is refused."""
    lone = parse({"replicas": 1, "ranks_per_replica": 6, "hosts": {"per_replica": 2}, "memory": {"shrink_to": 2}})
    for replicas in (1, 2):
        job = made(tmp_path, lone.model_copy(update={"replicas": replicas}))
        model = nn.Sequential(*copy.deepcopy(parts))
        fully_shard(model, mesh=mesh)
        if replicas == 1:
            job.adopt(model, batch_norm="mean")
            continue
        refused(partial(job.adopt, model, batch_norm="mean"), re.escape(why), "memory.shrink_to")


def test_a_stream_needs_data_shards_of_the_replicas_own(tmp_path: Path) -> None:
    config = parse({"replicas": 2, "ranks_per_replica": 1, "data": {"assignment": "global"}})
    job = made(tmp_path, config)
    refused(lambda: job.stream([1]), r"^data.assignment: got 'global'; allowed: per_replica, with job.stream")


@pytest.mark.parametrize(
    ("assignment", "replica", "expected"),
    [("per_replica", 1, [0, 1, 2, 3, 4]), ("global", 1, [2, 3, 6, 7, 10]), ("global", 0, [0, 1, 4, 5, 8])],
)
def test_what_is_read_ahead_is_what_the_next_steps_take(mesh, assignment, replica, expected) -> None:
    settings = {"train": {"accumulate": 2}, "data": {"assignment": assignment}}
    one = OneRank(mesh, parse({"replicas": 2, "ranks_per_replica": 1, **settings}))
    one.driver.guess(one.source, replica)
    (ahead,) = one.source.guess.call_args.args
    assert [at.unit for at in islice(ahead, 5)] == expected


@pytest.mark.parametrize("how", ["an error", "a close"])
def test_a_loop_goes_on_where_the_one_before_has_left_off(how: str) -> None:
    """With the same source, and not after an error."""

    def batches() -> Generator[int, None, None]:
        yield from range(4)
        raise OverflowError

    loop = OneLoop()
    assert next(loop.rest(loop, batches)) == 0
    refused(lambda: next(loop.rest("", batches)), "got 'another str'", key="job.batches")
    assert list(islice(loop.rest(loop, batches), 3)) == [1, 2, 3]
    if how == "a close":
        loop.close()
    else:
        with pytest.raises(OverflowError):
            next(loop.rest(loop, batches))
    with pytest.raises(RuntimeError, match="error before"):
        next(loop.rest(loop, batches))


def test_loops_after_the_end_are_empty() -> None:
    loop = OneLoop()
    assert [list(loop.rest(loop, lambda: (n for n in range(2)))) for _ in range(3)] == [[0, 1], [], []]
    assert list(loop.rest("another", lambda: (n for n in range(2)), over=True)) == []


@mock.patch.object(Job, "over", True)
def test_a_later_epoch_may_have_a_loader_of_its_own(job: Job) -> None:
    job.optimizer(torch.optim.AdamW(shard(job).parameters(), lr=0.1))
    assert list(job._loop.rest("first", lambda: (n for n in ()))) == list(job.batches(job.loader(Numbers()))) == []


def test_a_replay_refuses_a_stream() -> None:
    replay = object.__new__(ReplayJob)
    refused(lambda: replay.stream([1]), r"^replay: got 'a loop over job.stream'; allowed: job.loader")


def test_the_whole_model_is_gathered_as_its_state_dict_names_it(job: Job) -> None:
    refused(job.full_state_dict, key="job.full_state_dict")
    params: dict[str, Any] = dict(shard(job).named_parameters())
    whole = job.full_state_dict()
    assert list(whole) == list(Odd(0).state_dict())
    for name, param in params.items():
        assert type(whole[name]) is torch.Tensor
        assert torch.equal(whole[name], param.full_tensor())
