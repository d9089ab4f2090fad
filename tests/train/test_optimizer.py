import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups, finish, tensors
from tests.support.refused import refused


def record(
    weights: tuple[int, ...] = (1, 1), norm: float = 0.0, step: int = 1, lr_scale: float = 1.0
) -> CommitRecord:
    made = tuple(Contribution(r, w, r, 0) for r, w in enumerate(weights))
    return CommitRecord(1, 0, step, "0" * 32, tuple(range(len(weights))), 3, made, "d", norm, lr_scale)


def sums() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=g) for n in (5, 1, 0, 7)]


@pytest.mark.parametrize(("weights", "ranks", "divisor"), [((1,), 1, 1), ((1, 1, 1), 1, 3), ((2, 3), 4, 1.25)])
def test_the_divisor_is_the_weights_of_the_contributors_by_their_ranks(weights, ranks, divisor) -> None:
    """FSDP2 has divided by the number of ranks."""
    got = sums()
    finish(record(weights), got, None, ranks)
    assert all(torch.equal(a, b / divisor) for a, b in zip(got, sums(), strict=True))


@pytest.mark.parametrize(("clip", "clipped"), [(None, False), (0.25, True), (1e9, False)])
def test_the_gradient_is_clipped_by_the_norm_in_the_record(clip: float | None, clipped: bool) -> None:
    total = math.sqrt(sum(float(t.double().square().sum()) for t in sums()))
    got = sums()
    finish(record((1, 1), norm=total / 2), got, clip, 1)
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in got))
    assert norm == pytest.approx(clip if clipped else total / 2, rel=1e-4)


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def groups() -> Groups:
    m = model()
    two: list[dict[str, Any]] = [{"params": [m.weight], "lr": 0.2}, {"params": [m.bias]}]
    optimizer = torch.optim.AdamW(two, lr=0.1)
    create_state(optimizer)
    return Groups(optimizer, lambda step: 1.0 / step)


def test_the_rate_follows_from_the_record_and_leaves_no_trace() -> None:
    g = groups()
    assert g.rates(record(step=4, lr_scale=0.5)) == [0.2 / 8, 0.1 / 8]
    used: list[list[float]] = []
    step = g.optimizers[0].step
    g.optimizers[0].step = lambda: (used.append([x["lr"] for x in g.optimizers[0].param_groups]), step())[1]  # type: ignore
    before = g.hyper()
    for p in (p for x in g.optimizers[0].param_groups for p in x["params"]):
        p.grad = torch.ones_like(p)
    g.step(record(step=4, lr_scale=0.5))
    assert used == [[0.2 / 8, 0.1 / 8]]
    assert g.hyper() == before
    assert [h["lr"] for h in before] == [0.2, 0.1]


def test_hyper_parameters_of_another_optimizer_are_refused() -> None:
    g = groups()
    for wrong in (g.hyper()[:1], ({**g.hyper()[0], "nesterov": True}, g.hyper()[1]), ({}, {})):
        refused(partial(g.adopt, wrong), r"AdamW'; allowed: the optimizers of the state .*expected")


@pytest.mark.parametrize("when", ["before the optimizer is wrapped", "afterwards"])
def test_a_torch_scheduler_is_refused(when: str) -> None:
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
    made = Groups(optimizer, None) if when == "afterwards" else None
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(ConfigError, match=r"a torch learning rate scheduler'; allowed: one that the job steps"):
        (made or Groups(optimizer, None)).check()


@pytest.mark.parametrize(("key", "value"), [("lr", 0.05), ("weight_decay", 0.5)])
def test_any_hyper_parameter_that_somebody_else_sets_is_refused(key: str, value: float) -> None:
    g = groups()
    g.check()
    g.optimizers[0].param_groups[1][key] = value
    refused(g.check, rf"\[.*, {value}\] instead of")


def test_a_schedule_may_give_each_group_a_factor_of_its_own() -> None:
    g = Groups(groups().optimizers, lambda step: [1.0, 1.0 / step])
    assert g.rates(record(step=4, lr_scale=0.5)) == [0.2 / 2, 0.1 / 8]
    with pytest.raises(ConfigError, match=r"3 factors for step 1'; allowed: one, or one for each of the 2"):
        Groups(g.optimizers, lambda step: [1.0] * 3).rates(record())


def test_a_state_that_is_loaded_too_late_is_refused() -> None:
    g = groups()
    before = g.hyper()
    with pytest.raises(ConfigError, match=r"a state that is loaded before job.optimizer"):
        g.optimizers[0].load_state_dict(g.optimizers[0].state_dict())
    assert g.hyper() == before


# The state that an optimizer has before its first step is the one that torch would have made in it.


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def mixed_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def train(m: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> None:
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * seed + step))
        m(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(m: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return tensors(optimizer, {id(p): n for n, p in m.named_parameters()})


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_a_state_that_was_loaded_for_another_optimizer_is_refused() -> None:
    before, ours = mixed_model(), mixed_model()
    first = torch.optim.AdamW(before.parameters(), lr=0.1)
    train(before, first)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1, amsgrad=True)
    loaded = first.state_dict()
    loaded["param_groups"][0]["amsgrad"] = True
    optimizer.load_state_dict(loaded)
    refused(lambda: create_state(optimizer), r"AdamW.*holds exp_avg, exp_avg_sq, step instead of")


class Seen(torch.optim.AdamW):
    stepped: ClassVar[list[tuple[int, ...]]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.stepped += [tuple(p.shape) for group in self.param_groups for p in group["params"]]
        super().step(closure)


def test_each_shape_of_a_sharded_model_is_stepped_once_before_the_job(mesh: DeviceMesh) -> None:
    layers = [torch.nn.Linear(4, 6), *(torch.nn.Linear(6, 6) for _ in range(4)), torch.nn.Linear(6, 99)]
    model = torch.nn.Sequential(*layers)
    fully_shard(model, mesh=mesh)
    before = copy.deepcopy(model.state_dict())
    optimizer = Seen(model.parameters(), lr=0.1)
    Seen.stepped.clear()
    create_state(optimizer)
    everything = [tuple(p.shape) for p in model.parameters()]  # the step that makes the state
    # A small one stands for the large one, (99, 6).
    assert Seen.stepped[-5 - len(everything) :] == [*everything, (6, 4), (6,), (6, 6), (4, 4), (99,)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("layers", [1, 5])
def test_an_update_that_no_sharded_parameter_has_is_refused(mesh: DeviceMesh, layers: int) -> None:
    """One that is the whole model is not stepped; a small one is, in its place."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(layers)))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    refused(lambda: create_state(optimizer), r"SGD.*a trial step fails: NotImplementedError")


class Short(torch.optim.SGD):
    """It lacks memory for a copy of a parameter that is not small."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (params,) = (group["params"] for group in self.param_groups)
        if len(params) == 1 and params[0].numel() > 16:
            raise MemoryError
        super().step(closure)


def test_an_optimizer_is_not_blamed_for_memory_that_its_warm_up_lacks(mesh: DeviceMesh) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6, bias=False) for _ in range(5)))
    fully_shard(model, mesh=mesh)
    with pytest.raises(MemoryError):
        create_state(Short(model.parameters(), lr=0.1, momentum=0.9))


class Lion(torch.optim.Optimizer):
    """Somebody's own optimizer, whose state is all zeros before the first step."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                p.add_(torch.sign(state["average"] * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                state["average"].lerp_(p.grad, 0.01)


class FromOnes(Lion):
    """Its state begins with the gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["average"] = p.grad.clone() if not state else state["average"].lerp(p.grad, 0.5)
                p.add_(state["average"], alpha=-group["lr"])


class Counts(Lion):
    """It keeps a number that is no tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1


def test_an_optimizer_that_is_not_torchs_own_is_tried_out() -> None:
    ours, plain = mixed_model(), mixed_model()
    optimizer, natural = Lion(ours.parameters()), Lion(plain.parameters())
    create_state(optimizer)
    assert len(state_of(ours, optimizer)) == 4
    train(ours, optimizer)
    train(plain, natural)
    assert_same(state_of(ours, optimizer), state_of(plain, natural))


REFUSED: dict[str, tuple[Make, str]] = {
    "starts from the gradient": (FromOnes, "FromOnes.*trains differently"),
    "keeps a number": (Counts, "Counts.*count, which is no tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_optimizer_that_would_train_differently_is_refused_by_name(case: str) -> None:
    make, said = REFUSED[case]
    m = mixed_model()
    weights = [p.detach().clone() for p in m.parameters()]
    optimizer = make(m.parameters())
    refused(lambda: create_state(optimizer), said)
    assert all(torch.equal(a, b) for a, b in zip(weights, m.parameters(), strict=True))


def test_each_group_and_each_shape_is_tried_out() -> None:
    m = mixed_model()
    groups: list[dict[str, Any]] = [
        {"params": [m[0].weight, m[1].bias]},
        {"params": [m[1].weight], "dampening": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    refused(lambda: create_state(optimizer), "SGD")


class Counted(torch.optim.AdamW):
    """It counts the steps of all its copies."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Counted.steps += 1
        super().step()


def test_many_groups_of_one_kind_are_tried_once() -> None:
    """As with a rate for each layer, and no decay for vectors."""

    def trials(count: int) -> int:
        """Steps with that many groups, without the one in which each gets its state."""
        Counted.steps = 0
        params = [nn.Parameter(torch.randn([3] * (1 + i % 2))) for i in range(count)]
        groups = [
            {"params": [p], "lr": 0.1 / (i + 1), "weight_decay": 0.1 * (i % 2)} for i, p in enumerate(params)
        ]
        optimizer = Counted(groups)
        create_state(optimizer)
        assert all(len(optimizer.state[p]) == 3 for p in params)
        return Counted.steps - count

    assert trials(400) == trials(2) > 0


def test_the_users_hooks_hear_nothing_of_it() -> None:
    m = mixed_model()
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    optimizer.register_step_post_hook(lambda *_: heard.append("after"))
    create_state(optimizer)
    assert heard == []
    train(m, optimizer, steps=1)
    assert heard == ["before", "after"]
