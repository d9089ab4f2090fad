import copy
import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups, tensors
from tests.support.refused import refused

STEPS = 12
LOSSES = (3.0, 2.5, 2.5, 2.6, 2.4, 2.4, 2.4, 2.4, 2.4, 2.4, 2.3, 2.3)


class Warming:
    """A factor that is an object, with a number of its own."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.steps)


def root(epoch: int, power: float) -> float:
    return float((epoch + 1) ** -power)


Make = Callable[[torch.optim.Optimizer], LRScheduler]
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of each group": lambda o: torchs.LambdaLR(o, [Warming(4), partial(root, power=0.5)]),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: torchs.StepLR(o, 3, 0.3),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [2, 3, 7], 0.3),
    "ConstantLR": lambda o: torchs.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: torchs.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, 7, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 1e-3, 0.1, 3, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, [0.3, 0.1], total_steps=STEPS, three_phase=True),
    "SWALR": lambda o: SWALR(o, 0.01, 5),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.LinearLR(o, 0.1, 1.0, 3), torchs.CosineAnnealingLR(o, 6), torchs.ExponentialLR(o, 0.5)], [3, 9]
    ),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler(
        [torchs.LinearLR(o, 0.1, 1.0, 3), torchs.StepLR(o, 4, 0.3)], o
    ),
    "ReduceLROnPlateau": lambda o: torchs.ReduceLROnPlateau(o, factor=0.5, patience=2),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.02),
    "adam with a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.02), foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
}


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def made(optimizer: str, scheduler: str) -> tuple[nn.Linear, torch.optim.Optimizer, LRScheduler]:
    m = model()
    rate = torch.tensor(0.05) if "tensor" in optimizer else 0.05
    o = OPTIMIZERS[optimizer]([{"params": [m.weight]}, {"params": [m.bias], "lr": rate}])
    return m, o, SCHEDULERS[scheduler](o)


def record(step: int, poisoned: bool = False, loss: float | None = None, lr_scale: float = 1.0) -> CommitRecord:
    mine = (Contribution(0, 1, 0, step, LOSSES[step - 1] if loss is None else loss),)
    bad = (0,) if poisoned else ()
    return CommitRecord(1, 0, step, "0" * 32, (0,), 1, mine, "d", lr_scale=lr_scale, poisoned=bad)


def grads(m: nn.Module, step: int) -> None:
    for at, p in enumerate(m.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + at))


def plain(optimizer: str, scheduler: str) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, LRScheduler]]:
    """torch's own loop, after each step."""
    m, o, s = made(optimizer, scheduler)
    for step in range(1, STEPS + 1):
        grads(m, step)
        o.step()
        if isinstance(s, torchs.ReduceLROnPlateau):
            s.step(LOSSES[step - 1])
        else:
            s.step()
        yield m, o, s


def apply(groups: Groups, m: nn.Module, step: int, **facts: Any) -> None:
    """What `LiveState.apply` does with the optimizers."""
    made = record(step, **facts)
    if made.updates:
        grads(m, step)
        groups.step(made)
    groups.advance(made)


def rejoined(
    m: nn.Linear, o: torch.optim.Optimizer, groups: Groups, optimizer: str, scheduler: str
) -> tuple[nn.Linear, torch.optim.Optimizer, LRScheduler, Groups]:
    """A process that has just begun, with the state of another one."""
    fresh, other, schedule = made(optimizer, scheduler)
    create_state(other)
    again = Groups(other, schedule)
    again.adopt(json.loads(json.dumps(groups.hyper(), allow_nan=False)))
    fresh.load_state_dict(m.state_dict())
    names = {id(p): n for n, p in fresh.named_parameters()}
    theirs = tensors(o, {id(p): n for n, p in m.named_parameters()})
    for name, tensor in tensors(other, names).items():
        tensor.copy_(theirs[name])
    assert again.hyper() == groups.hyper()
    return fresh, other, schedule, again


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_it_trains_as_in_a_plain_loop_over_a_rejoin(optimizer: str, scheduler: str) -> None:
    m, o, s = made(optimizer, scheduler)
    create_state(o)
    groups = Groups(o, s)
    rates: set[float] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, (theirs, natural, schedule) in enumerate(plain(optimizer, scheduler), 1):
            apply(groups, m, step)
            groups.check()
            assert s.get_last_lr() == schedule.get_last_lr()
            assert s.state_dict() == schedule.state_dict()
            for a, b in zip(o.param_groups, natural.param_groups, strict=True):
                assert {k: v for k, v in a.items() if k != "params"} == {
                    k: v for k, v in b.items() if k != "params"
                }
            assert all(torch.equal(a, b) for a, b in zip(m.parameters(), theirs.parameters(), strict=True))
            if step in (1, 5, 8):
                m, o, s, groups = rejoined(m, o, groups, optimizer, scheduler)
            rates.add(float(s.get_last_lr()[0]))
    assert len(rates) > 1, "the schedule changed nothing"


def test_every_scheduler_of_torch_is_tried() -> None:
    exported = {n for n in torchs.__all__ if n not in ("LRScheduler", "LRSchedulerWithMetrics")} | {"SWALR"}
    assert exported <= {name.split()[0] for name in SCHEDULERS}


def test_the_share_of_units_is_multiplied_on_top_for_the_update_alone() -> None:
    m, o, s = made("sgd", "ExponentialLR")
    groups = Groups(o, s)
    before = m.weight.detach().clone()
    apply(groups, m, 1, lr_scale=0.5)
    grads(m, 1)
    assert m.weight.grad is not None
    assert torch.equal(m.weight, before.add(m.weight.grad, alpha=-0.01))
    assert s.get_last_lr() == [0.02 * 0.7, 0.05 * 0.7]
    assert groups.rates(record(2, lr_scale=0.25)) == [0.02 * 0.7 * 0.25, 0.05 * 0.7 * 0.25]


@pytest.mark.parametrize("facts", [{"poisoned": True}, {"loss": 1.0}])
def test_a_step_that_changes_no_weight_counts_as_one(facts: dict[str, Any]) -> None:
    _, o, s = made("sgd", "ExponentialLR")
    groups = Groups(o, s)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 2, 3):
            groups.advance(record(step, **facts))
    assert s.get_last_lr()[0] == pytest.approx(0.02 * 0.7**3)
    assert s.last_epoch == 3


def test_of_a_skipped_step_a_plateau_hears_nothing() -> None:
    _, o, s = made("sgd", "ReduceLROnPlateau")
    groups = Groups(o, s)
    groups.advance(record(1, poisoned=True))
    assert s.last_epoch == 0
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau.*a model that returns its loss"):
        groups.advance(record(2, loss=float("nan")))


def test_the_calls_of_a_loop_do_nothing() -> None:
    """Loops of torch's tutorials, torchtitan and Hugging Face call scheduler.step() after optimizer.step()."""
    m, o, s = made("sgd", "StepLR")
    groups = Groups(o, s)
    for step in range(1, 4):
        for micro in range(2):
            groups.note_loop(contributed=micro == 1)
            s.step()
        apply(groups, m, step)
    assert s.last_epoch == 3
    assert isinstance(s, torchs.StepLR)
    assert type(s).__name__ == "StepLR"
    assert copy.copy(s.state_dict()) == dict(s.state_dict())


def test_a_loop_that_steps_only_when_its_gradient_counted_is_right() -> None:
    _, o, s = made("sgd", "StepLR")
    groups = Groups(o, s)
    for contributed in (True, False, False, True, False, True):
        groups.note_loop(contributed)
        if contributed:
            s.step()


def epochs(groups: Groups, s: LRScheduler) -> None:
    groups.note_loop(contributed=True)
    groups.note_loop(contributed=True)
    s.step()


def twice(groups: Groups, s: LRScheduler) -> None:
    for _ in range(2):
        groups.note_loop(contributed=True)
        s.step()
    s.step()


def metric(groups: Groups, s: Any) -> None:
    groups.note_loop(contributed=True)
    s.step(0.5)


CALLS: dict[str, tuple[Callable[[Groups, LRScheduler], object], str]] = {
    "a metric": (metric, "a metric for ReduceLROnPlateau"),
    "once an epoch": (epochs, "got 'a call after 2 steps'; allowed: one call after each optim.step"),
    "more often than steps": (twice, "without an optim.step"),
    "before the first step": (lambda groups, s: s.step(), "without an optim.step"),
    "to another epoch": (lambda groups, s: s.step(7), "an argument for StepLR"),
    "a state that is loaded late": (lambda groups, s: s.load_state_dict(s.state_dict()), "before job.optimizer"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_would_not_be_one_step_is_refused(case: str) -> None:
    call, said = CALLS[case]
    _, o, s = made("sgd", "ReduceLROnPlateau" if call is metric else "StepLR")
    groups = Groups(o, s)
    refused(lambda: call(groups, s), said)


class Keeps(LRScheduler):
    """Somebody's own scheduler, with a history."""

    def __init__(self, optimizer: torch.optim.Optimizer, history: Any) -> None:
        self.history = history
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return list(self.base_lrs)


WRONG: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "a history of functions": lambda o: Keeps(o, lambda: 1),
    "a history of tensors": lambda o: Keeps(o, torch.zeros(2)),
    "a history of objects": lambda o: Keeps(o, [object()]),
    "of another optimizer": lambda o: made("sgd", "ExponentialLR")[2],
    "a number": lambda o: 0.5,
    "functions": lambda o: [lambda step: 1.0],
    "none": lambda o: [],
    "a name": lambda o: "cosine",
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_a_schedule_is_refused(case: str) -> None:
    _, o, _ = made("sgd", "StepLR")
    refused(lambda: Groups(o, WRONG[case](o)), r"^job.optimizer")


def test_a_state_of_other_schedulers_is_refused() -> None:
    hyper = {name: Groups(*made("sgd", name)[1:]).hyper() for name in ("StepLR", "ExponentialLR")}
    unscheduled = Groups(made("sgd", "StepLR")[1], None).hyper()
    for wrong in (hyper["ExponentialLR"], unscheduled):
        adopting = partial(Groups(*made("sgd", "StepLR")[1:]).adopt, wrong)
        refused(adopting, r"the optimizers of the state that is loaded .*expected")
