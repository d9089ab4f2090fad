"""Running statistics that are part of the committed state, on one rank; what several ranks do is added by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.errors import ConfigError
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel
from ft_hsdp.train.fsdp.moving_buffers import chosen
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups
from ft_hsdp.train.state.live_state import LiveState
from tests.support.refused import refused

Statistics = dict[str, Tensor]


class Net(nn.Module):
    """Two norms with momenta of their own."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3, momentum=0.5)
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x))).square().mean()


def batch(unit: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(unit)) * (unit + 1) + unit


def adopted(
    mesh: DeviceMesh, make: Callable[[], Any], **options: Any
) -> tuple[AdoptedModel, Any, dict[int, Tensor]]:
    torch.manual_seed(0)
    model, seen = make(), dict[int, Tensor]()
    fully_shard(model, mesh=mesh)
    owner = AdoptedModel(model, 1, seen.__setitem__, **options)
    assert owner.moving is not None
    owner.moving.state_dict()  # as the job does with the first batch
    return owner, model, seen


def built(mesh: DeviceMesh, momentum: float | None) -> tuple[AdoptedModel, Net, dict[int, Tensor]]:
    return adopted(mesh, lambda: Net(momentum), batch_norm="mean")


def held(model: nn.Module) -> dict[str, bytes]:
    return {n: bytes(b.contiguous().view(-1).view(torch.uint8).numpy()) for n, b in model.named_buffers()}


def train(owner: AdoptedModel, model: nn.Module, replica: int, *units: int) -> dict[str, bytes]:
    """Train units as one replica, up to the sums; what the buffers hold then."""
    for number, unit in enumerate(units, 1):
        owner.sync(number == len(units))
        model(batch(unit)).backward()
    made = held(model)
    owner.finish(replica)
    return made


def contribution(owner: AdoptedModel, model: Net, seen: dict[int, Tensor], *units: int) -> list[Tensor]:
    train(owner, model, 0, *units)
    sums = [seen[bucket].clone() for bucket in range(len(owner.sizes))]
    owner.clear()
    return sums


def one_forward(model: Net, unit: int) -> Statistics:
    """What plain torch makes of the statistics in one micro-batch."""
    alone = copy.deepcopy(model)
    alone(batch(unit))
    return {n: b.clone() for n, b in alone.named_buffers()}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_step_moves_them_by_the_mean_over_its_units(mesh: DeviceMesh, momentum: float | None) -> None:
    owner, model, seen = built(mesh, momentum)
    torch.manual_seed(0)
    plain = Net(momentum)
    for step in range(3):
        units = [4 * step + n for n in range(4)]
        alone = [one_forward(plain, unit) for unit in units]
        for name, buffer in plain.named_buffers():
            buffer.copy_(torch.stack([each[name].double() for each in alone]).mean(0))
        # One replica trains three units, the other one the fourth.
        mine, theirs = (contribution(owner, model, seen, *part) for part in (units[:3], units[3:]))
        owner.assign([a + b for a, b in zip(mine, theirs, strict=True)])
        found = dict(model.named_buffers())
        for name, wanted in plain.named_buffers():
            torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6)
    assert found["second.num_batches_tracked"] == 3, "a step counts once"


def test_a_number_of_batches_that_fp32_does_not_hold_counts_on(mesh: DeviceMesh) -> None:
    owner, model, seen = built(mesh, 0.1)
    assert owner.moving is not None
    held = owner.moving.state_dict()
    owner.moving.load_state_dict(held | {"first.num_batches_tracked": torch.tensor(2**24)})
    for step in range(2):
        owner.assign(contribution(owner, model, seen, 2 * step, 2 * step + 1))
    assert model.first.num_batches_tracked == 2**24 + 2


def test_what_is_not_committed_leaves_no_trace(mesh: DeviceMesh) -> None:
    owner, model, seen = built(mesh, 0.1)
    before = {n: b.clone() for n, b in model.named_buffers()}
    contribution(owner, model, seen, 1, 2)  # dropped
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    once = contribution(owner, model, seen, 3)
    model(batch(9))  # an evaluation that forgot eval()
    again = contribution(owner, model, seen, 3)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_a_second_part_of_a_step_holds_its_own_units_alone(mesh: DeviceMesh) -> None:
    owner, model, seen = built(mesh, 0.1)
    whole = contribution(owner, model, seen, 1, 2)[-1]
    for unit in (1, 2):
        owner.sync(True)
        model(batch(unit)).backward()
        owner.finish()
        owner.release()
        part = seen[len(owner.sizes) - 1].clone()
        assert part[-1] == 1
        whole -= part
    torch.testing.assert_close(whole, torch.zeros_like(whole), rtol=0, atol=1e-6)


def test_they_are_part_of_the_state_and_not_of_what_is_frozen(mesh: DeviceMesh) -> None:
    owner, model, _ = built(mesh, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    create_state(optimizer)
    live = LiveState(owner, Groups(optimizer, None), Ledger.empty(1), 0, 1)
    live.describe_frozen(ReplicaGroup())
    assert live.frozen == ()
    statistics = owner.moving
    assert statistics is not None
    held = statistics.state_dict()
    assert set(held) == {n for n, _ in model.named_buffers()}
    with torch.no_grad():
        model.first.running_mean.fill_(7)  # type: ignore[union-attr]
    statistics.load_state_dict({n: torch.full_like(t, 2) for n, t in held.items()})
    assert all((b == 2).all() for b in model.buffers())


def test_values_that_are_loaded_after_adoption_are_the_initial_ones(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Net(0.1)
    fully_shard(model, mesh=mesh)
    owner = AdoptedModel(model, 1, lambda *_: None, batch_norm="mean")
    owner.settle()
    model(batch(0))  # a warm-up
    owner.clear()
    assert (model.first.running_mean == 0).all()  # type: ignore[operator]
    model.first.running_mean.fill_(3)  # type: ignore[union-attr]
    assert owner.moving is not None
    assert (owner.moving.state_dict()["first.running_mean"] == 3).all()


def test_another_way_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match=r"job.adopt\(batch_norm\): got 'sum'; allowed: \"mean\", or None"):
        AdoptedModel(Net(0.1), 1, lambda *_: None, batch_norm="sum")


# What users declare.


class Odd(nn.Module):
    """Buffers of many types, which forward changes as its input says, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.teacher = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
        self.register_buffer("code", torch.tensor([[0.0, float("nan")], [float("inf"), -0.0]]).T)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seen", torch.tensor([False] * 5))
        self.register_buffer("mixed", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.code: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.code.data[0] += x.sum()
        self.count = self.count + 2**40 + int(x[0, 0] * 100)
        self.seen[int(self.count) % 5] = True
        self.mixed.lerp_(x.mean(0).bfloat16(), 0.5)  # type: ignore[operator]
        return self.last(x).square().mean()


def odd(mesh: DeviceMesh, buffers: dict[str, str]) -> tuple[AdoptedModel, Odd, dict[int, Tensor]]:
    return adopted(mesh, Odd, buffers=buffers, slots=3)


ALL = {"code": "state", "count": "state", "seen": "state", "mixed": "state"}


def test_a_step_takes_the_value_of_its_lowest_contributor_bit_for_bit(mesh: DeviceMesh) -> None:
    owner, model, seen = odd(mesh, ALL)
    for step in range(3):
        made, sums = {}, None
        for replica in (0, 1, 2):
            made[replica] = train(owner, model, replica, 3 * step + replica)
            mine = [seen[bucket].clone() for bucket in range(len(owner.sizes))]
            if replica:  # replica 0 is poisoned
                sums = mine if sums is None else [a + b for a, b in zip(sums, mine, strict=True)]
            owner.clear()
        assert sums is not None
        owner.assign(sums, 1)
        assert held(model) == made[1] != made[2]


def test_a_second_part_of_a_step_adds_to_the_value_of_the_first(mesh: DeviceMesh) -> None:
    owner, model, seen = odd(mesh, ALL)
    train(owner, model, 2, 1, 2)
    first = seen[len(owner.sizes) - 1].clone()
    owner.release()
    made = train(owner, model, 2, 3)
    owner.assign([*(seen[b] for b in range(owner.gradients)), first + seen[len(owner.sizes) - 1]], 2)
    assert held(model) == made


def test_a_value_that_is_not_committed_is_taken_back(mesh: DeviceMesh) -> None:
    owner, model, _ = odd(mesh, ALL)
    before = held(model)
    made = train(owner, model, 0, 1)
    owner.clear()  # the attempt is discarded
    assert held(model) == before != made
    assert train(owner, model, 0, 1) == made, "the step is repeated"


def test_what_a_callback_on_a_commit_changes_is_committed_and_what_the_loop_does_later_is_not(mesh) -> None:
    owner, model, _ = odd(mesh, {"*": "state"})
    moving = owner.moving
    assert moving is not None
    assert moving.strayed(between=True) == []
    model.count += 1
    model.teacher.weight.data += 1
    owner.capture()
    assert moving.strayed(between=True) == []
    committed = moving.state_dict()
    assert committed["count"] == 1
    teacher: Any = model.teacher.weight
    assert torch.equal(committed["teacher.weight"].to_local(), teacher.to_local())
    model.count += 1
    model.teacher.weight.data += 1
    assert moving.strayed(between=True) == ["count", "teacher.weight"]
    owner.sync(True)
    assert moving.strayed(between=True) == []
    assert model.count == 1


def test_a_model_with_nothing_but_frozen_parameters_declared_has_no_bucket_more(mesh: DeviceMesh) -> None:
    owner, *_ = odd(mesh, {"teacher.*": "state"})
    assert len(owner.sizes) == owner.gradients


@pytest.mark.parametrize("others", [{}, ALL], ids=["alone", "beside others"])
def test_a_sharded_tensor_moves_with_a_commit_alone(mesh: DeviceMesh, others: dict[str, str]) -> None:
    """A replica that is behind applies the commit without a batch, so what the loop does is not there."""
    owner, model, seen = odd(mesh, {**others, "teacher.*": "state"})
    assert owner.moving is not None
    teacher: Any = model.teacher.weight
    before = teacher.to_local().clone()
    train(owner, model, 0, 1)
    assert owner.moving.strayed(between=False) == []
    teacher.data += 1
    assert owner.moving.strayed(between=False) == ["teacher.weight"]
    owner.assign([seen[b] for b in range(len(owner.sizes))], 0)
    assert torch.equal(teacher.to_local(), before)


def test_running_statistics_may_be_declared_like_every_other_buffer(mesh: DeviceMesh) -> None:
    model = Net(0.1)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match="'second with statistics"):
        AdoptedModel(model, 1, lambda *_: None, buffers={"first.*": "state"})
    AdoptedModel(model, 1, lambda *_: None, buffers={"*": "state"})


KINDS = {"a.code": "buffer", "a.count": "buffer", "a.cache": "scratch", "b.w": "frozen", "a.w": "trained"}


def test_the_first_pattern_that_names_a_tensor_counts() -> None:
    wanted = {"a.c?de": "mean", "[a]*": "local", "*.w": "state"}
    assert chosen(wanted, KINDS) == {"a.code": "mean", "a.count": "local", "a.cache": "local", "b.w": "state"}
    assert chosen({}, KINDS) == {}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"A.*": "state"}, r"got 'A\.\*'; allowed: a pattern .*\(a\.code, a\.count, a\.cache\)"),
        ({"a.w": "state"}, r"got 'a\.w'; .* a\.w is trained"),
        ({"a.code": "sum"}, r'\[a\.code\]: got \'sum\'; allowed: "state", "mean" or "local"'),
        (["a.code"], "patterns of names with their modes"),
    ],
)
def test_a_declaration_without_a_meaning_is_refused(wanted: dict[str, str], why: str) -> None:
    refused(lambda: chosen(wanted, KINDS), why)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"count": "mean"}, r"buffers\)\[count\]: got 'mean'; .* for torch.int64"),
        ({"teacher.weight": "mean"}, r"\[teacher.weight\]: got 'mean'; .* for a sharded parameter"),
    ],
)
def test_a_mean_of_what_has_none_is_refused(mesh: DeviceMesh, wanted: dict[str, str], why: str) -> None:
    refused(lambda: odd(mesh, wanted), why)


def test_a_declared_buffer_of_another_shape_is_refused(mesh: DeviceMesh) -> None:
    owner, model, _ = odd(mesh, {"mixed": "state"})
    model.mixed = torch.zeros(4)
    with pytest.raises(ConfigError, match=r"\[mixed\]: got 'torch.float32 \[4\]'; allowed: torch.bfloat16 \[3\]"):
        train(owner, model, 0, 1)
