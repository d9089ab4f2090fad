"""What a resume takes from the script, and what from the checkpoint: an argument that changed wins, no other."""

import copy
import json
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.given import GIVEN, ChangedSetting
from ft_hsdp.train.optimizer.groups import Groups, Schedule
from tests.support.refused import refused
from tests.train.test_lr_schedule import SCHEDULERS, Warming, apply, made, record, root

STEPS, AT = 12, 5
Made = tuple[nn.Linear, Groups]


def job(*optimizers: torch.optim.Optimizer, schedule: Schedule | None = None, settings: Any = None) -> Groups:
    for each in optimizers:
        create_state(each)
    groups = Groups(optimizers, schedule)
    groups.note_given(STEPS, settings)
    return groups


def written(groups: Groups) -> list[dict[str, Any]]:
    hyper: list[dict[str, Any]] = json.loads(json.dumps([*groups.hyper(), {GIVEN: groups.given}], allow_nan=False))
    return hyper


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def sgd(m: nn.Linear, second: float = 0.05, **more: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [m.weight]}, {"params": [m.bias], "lr": second}]
    return torch.optim.SGD(groups, **{"lr": 0.02, "momentum": 0.9, **more})


def trained(groups: Groups, m: nn.Module, first: int, last: int) -> list[list[float]]:
    rates = []
    for step in range(first, last + 1):
        rates.append(groups.rates(record(step)))
        apply(groups, m, step)
    return rates


@pytest.mark.parametrize("optimizer", ["adam with a tensor", "sgd"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_unchanged_script_goes_on_as_if_nothing_had_been(optimizer: str, scheduler: str) -> None:
    def one() -> Made:
        m, o, s = made(optimizer, scheduler)
        return m, job(o, schedule=s)

    m, whole = one()
    head = trained(whole, m, 1, AT)
    checkpoint, there = written(whole), m.state_dict()
    tail = trained(whole, m, AT + 1, STEPS)
    n, resumed = one()
    n.load_state_dict(copy.deepcopy(there))
    assert resumed.resume(checkpoint, AT) == ()
    assert resumed.hyper() == tuple(checkpoint[:-1])
    assert trained(resumed, n, AT + 1, STEPS) == tail
    assert resumed.hyper() == whole.hyper()
    assert head != tail


class Pairs(LRScheduler):
    """Somebody's own scheduler, recursive, with an argument that it keeps as an attribute."""

    def __init__(self, optimizer: torch.optim.Optimizer, gamma: float) -> None:
        self.gamma = gamma
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        moved = self.gamma if self.last_epoch % 2 else 1.0
        return [group["lr"] * moved for group in self.optimizer.param_groups]


def warmed(o: torch.optim.Optimizer, after: type[LRScheduler], argument: Any, milestone: int = 3) -> LRScheduler:
    return torchs.SequentialLR(o, [torchs.LinearLR(o, 0.1), after(o, argument)], [milestone])


def chained(o: torch.optim.Optimizer, gamma: float) -> LRScheduler:
    return torchs.ChainedScheduler([torchs.LinearLR(o, 0.1), torchs.StepLR(o, 4, gamma)], o)


def at_rate(o: torch.optim.Optimizer, rate: float) -> LRScheduler:
    o.param_groups[0]["lr"] = rate
    return torchs.CosineAnnealingLR(o, STEPS)


def either(o: torch.optim.Optimizer, kind: type[LRScheduler], argument: int) -> LRScheduler:
    return kind(o, argument)


Arguments = tuple[Any, ...]
# What makes the schedule, with which arguments before and now, and what is said of that.
CHANGES: list[tuple[Callable[..., LRScheduler], Arguments, Arguments, str]] = [
    (torchs.LambdaLR, (lambda e: 0.9**e,), (lambda e: 0.8**e,), "lr_lambdas.0(1) of LambdaLR"),
    (torchs.LambdaLR, (partial(root, power=0.5),), (partial(root, power=0.6),), "lr_lambdas.0(1) of LambdaLR"),
    (torchs.LambdaLR, (Warming(4),), (Warming(8),), "lr_lambdas.0(1) of LambdaLR"),
    (
        torchs.MultiplicativeLR,
        (lambda e: 0.9 if e < 6 else 0.5,),
        (lambda e: 0.9 if e < 3 else 0.5,),
        "lr_lambdas.0(2 to 3) of MultiplicativeLR",
    ),
    (torchs.StepLR, (3,), (4,), "step_size of StepLR"),
    (torchs.MultiStepLR, ([2, 3],), ([2, 3, 8],), "milestones of MultiStepLR"),
    (torchs.ConstantLR, (0.3, 4), (0.3, 8), "total_iters of ConstantLR"),
    (torchs.LinearLR, (0.1, 1.0, 5), (0.2, 1.0, 5), "start_factor of LinearLR"),
    (torchs.ExponentialLR, (0.7,), (0.8,), "gamma of ExponentialLR"),
    (torchs.PolynomialLR, (9,), (11,), "total_iters of PolynomialLR"),
    (torchs.CosineAnnealingLR, (6,), (STEPS,), "T_max of CosineAnnealingLR"),
    (torchs.CosineAnnealingWarmRestarts, (3, 2), (3, 1), "T_mult of CosineAnnealingWarmRestarts"),
    (
        torchs.CyclicLR,
        (1e-3, 0.1, 3, None, "triangular", 1.0, lambda x: 1 / x),
        (1e-3, 0.1, 3, None, "triangular", 1.0, lambda x: 1 / x**2),
        "scale_fn_custom.0(2) of CyclicLR",
    ),
    (torchs.OneCycleLR, (0.3, 6), (0.3, STEPS), "total_steps of OneCycleLR"),
    (torchs.OneCycleLR, (0.3, STEPS), (0.4, STEPS), "max_lr of SGD"),
    (SWALR, (0.01, 5), (0.02, 5), "swa_lr of SGD"),
    (warmed, (torchs.ExponentialLR, 0.5, 3), (torchs.ExponentialLR, 0.5, 4), "milestones of SequentialLR"),
    (warmed, (torchs.StepLR, 2), (torchs.ExponentialLR, 0.5), "schedulers.1 of SequentialLR"),
    (chained, (0.3,), (0.4,), "schedulers.1.gamma of ChainedScheduler"),
    (Pairs, (0.5,), (0.6,), "gamma of Pairs"),
    (at_rate, (0.1,), (0.2,), "lr of SGD in group 0"),
    (either, (torchs.StepLR, 3), (torchs.CosineAnnealingLR, STEPS), "the torch schedulers"),
]


@pytest.mark.parametrize(("make", "before", "now", "setting"), CHANGES)
def test_a_schedule_with_another_argument_is_the_one_of_a_job_that_had_it_from_the_first_step(
    make: Callable[..., LRScheduler], before: Arguments, now: Arguments, setting: str
) -> None:
    def one(arguments: Arguments) -> Made:
        m = model()
        o = sgd(m)
        return m, job(o, schedule=make(o, *arguments))

    m, groups = one(before)
    trained(groups, m, 1, AT)
    n, right = one(now)
    trained(right, n, 1, AT)
    m, resumed = one(now)
    found = resumed.resume(written(groups), AT)
    assert setting in [each.setting for each in found]
    assert len(found) == 1, "one line for each argument"
    assert resumed.hyper() == right.hyper()
    resumed.check()
    assert trained(resumed, m, AT + 1, STEPS) == trained(right, n, AT + 1, STEPS)
    assert one(now)[1].resume(written(resumed), STEPS) == (), "the next resume begins there"


def test_an_argument_of_one_group_wins_and_the_values_of_the_others_stay() -> None:
    m = model()
    groups = job(sgd(m))
    for group in groups.groups:
        group.update(lr=0.5, weight_decay=0.7)  # as a callback of job.on_commit may
    o = sgd(m, momentum=0.8, second=0.06)
    resumed = job(o)
    found = resumed.resume(written(groups), AT)
    assert found == (
        ChangedSetting("momentum of SGD", 0.9, 0.8),
        ChangedSetting("lr of SGD in group 1", 0.05, 0.06),
    )
    assert [(g["lr"], g["momentum"], g["weight_decay"]) for g in o.param_groups] == [
        (0.5, 0.8, 0.7),
        (0.06, 0.8, 0.7),
    ]


def test_what_no_schedule_moves_stays_when_the_schedule_is_computed_again() -> None:
    def one(cycle: int) -> Groups:
        o = sgd(model(), weight_decay=0.1)
        return job(o, schedule=torchs.OneCycleLR(o, 0.3, total_steps=cycle))

    groups, right = one(STEPS), one(STEPS + 4)
    trained(groups, model(), 1, AT)
    trained(right, model(), 1, AT)
    groups.groups[1]["weight_decay"] = 0.7  # by job.on_commit, once
    resumed = one(STEPS + 4)
    (found,) = resumed.resume(written(groups), AT)
    assert found.setting == "total_steps of OneCycleLR"
    assert [g["weight_decay"] for g in resumed.groups] == [0.1, 0.7]
    assert [(g["lr"], g["momentum"]) for g in resumed.groups] == [(g["lr"], g["momentum"]) for g in right.groups]


def plateau(m: nn.Linear, rate: float = 0.02, **more: Any) -> Groups:
    o = torch.optim.SGD(m.parameters(), lr=rate)
    return job(o, schedule=torchs.ReduceLROnPlateau(o, **{"factor": 0.5, "patience": 1, **more}))


def test_a_plateau_keeps_what_it_has_learnt_from_losses() -> None:
    m = model()
    groups = plateau(m)
    trained(groups, m, 1, STEPS)
    (rate,), then = [g["lr"] for g in groups.groups], written(groups)
    assert rate < 0.02
    resumed = plateau(model(), patience=7, min_lr=1e-4)
    found = resumed.resume(then, STEPS)
    assert {each.setting for each in found} == {
        f"{key} of ReduceLROnPlateau" for key in ("patience", "default_min_lr")
    }
    assert [g["lr"] for g in resumed.groups] == [rate]
    (_, was), (_, state) = then[-2]["schedulers"][0], resumed.hyper()[-1]["schedulers"][0]
    changed = {"patience": 7, "min_lrs": [1e-4], "default_min_lr": 1e-4}
    assert state == {**was, **changed}
    faster = plateau(model(), rate=0.3)
    assert faster.resume(then, STEPS) == (ChangedSetting("lr of SGD", 0.02, 0.3),)
    assert [g["lr"] for g in faster.groups] == [0.3]


def test_a_plateau_is_not_forgotten_because_of_a_scheduler_beside_it() -> None:
    def one(m: nn.Linear, iters: int) -> Groups:
        o = torch.optim.SGD(m.parameters(), lr=0.02)
        return job(o, schedule=[torchs.LinearLR(o, total_iters=iters), torchs.ReduceLROnPlateau(o)])

    m = model()
    groups = one(m, 4)
    trained(groups, m, 1, AT)
    refused(lambda: one(model(), 5).resume(written(groups), AT), r"ReduceLROnPlateau.*earlier losses are not kept")


def test_only_the_schedule_of_the_optimizer_that_changed_is_computed_again() -> None:
    def one(gamma: float) -> Made:
        m = model()
        both = torch.optim.Adam([m.weight], lr=0.02), torch.optim.SGD([m.bias], lr=0.05)
        return m, job(*both, schedule=[torchs.ExponentialLR(both[0], gamma), torchs.ExponentialLR(both[1], 0.5)])

    m, groups = one(0.9)
    trained(groups, m, 1, AT)
    groups.groups[1]["lr"] = 7.0
    _, resumed = one(0.8)
    assert [(c.old, c.new) for c in resumed.resume(written(groups), AT)] == [(0.9, 0.8)]
    assert [g["lr"] for g in resumed.groups] == [pytest.approx(0.02 * 0.8**AT), 7.0]


def test_without_its_scheduler_an_optimizer_has_what_it_is_given() -> None:
    m = model()
    o = sgd(m)
    groups = job(o, schedule=torchs.OneCycleLR(o, 0.3, total_steps=STEPS))
    trained(groups, m, 1, AT)
    o = sgd(m)
    (found, *_) = (each for each in job(o).resume(written(groups), AT) if "schedulers" in each.setting)
    assert (found.old, found.new) == (["OneCycleLR"], [])
    assert [(g["lr"], g["momentum"]) for g in o.param_groups] == [(0.02, 0.9), (0.05, 0.9)]
    assert all("initial_lr" not in g for g in o.param_groups)


class Own(torch.optim.SGD):
    """Somebody's own optimizer, with an argument in no group."""

    def __init__(self, params: Any, rho: float) -> None:
        super().__init__(params, lr=0.1)
        self.rho = rho


def test_what_else_an_optimizer_keeps_is_compared_too() -> None:
    groups = job(Own(model().parameters(), 0.1), settings={"optim.clip": 1.0})
    resumed = job(Own(model().parameters(), 0.2), settings={"optim.clip": None})
    assert resumed.resume(written(groups), AT) == (
        ChangedSetting("optim.clip", 1.0, None),
        ChangedSetting("rho of Own", 0.1, 0.2),
    )


@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}])
def test_how_it_is_computed_is_no_change(flags: dict[str, Any]) -> None:
    o = sgd(model(), **flags)
    assert job(o).resume(written(job(sgd(model()))), AT) == ()
    assert [g["foreach"] for g in o.param_groups] == [flags["foreach"]] * 2


def test_a_parameter_that_moves_to_another_group_is_said() -> None:
    def one(m: nn.Linear, *groups: list[str]) -> Groups:
        params = dict(m.named_parameters())
        made = Groups(torch.optim.SGD([{"params": [params[n] for n in names]} for names in groups], lr=0.1))
        made.check_parameters(params)
        made.note_given(STEPS)
        return made

    checkpoint = written(one(model(), ["weight"], ["bias"]))
    found = one(model(), ["bias"], ["weight"]).resume(checkpoint, AT)
    assert [each.setting for each in found] == ["params of SGD in group 0", "params of SGD in group 1"]
    (found,) = one(model(), ["bias", "weight"]).resume(checkpoint, AT)
    assert found == ChangedSetting("the number of parameter groups of SGD", 2, 1)


def test_a_function_of_the_step_is_compared_by_its_values() -> None:
    m = model()
    groups = job(sgd(m), schedule=lambda step: 1 / step)
    trained(groups, m, 1, AT)
    assert job(sgd(m), schedule=lambda step: step**-1.0).resume(written(groups), AT) == ()
    (found,) = job(sgd(m), schedule=lambda step: min(1.0, 2 / step)).resume(written(groups), AT)
    assert found == ChangedSetting("schedule(2)", 0.5, 1.0)
    (found,) = job(sgd(m), schedule=lambda step: 1 / step, settings={"lr.warmup": 3}).resume(written(groups), AT)
    assert found == ChangedSetting("lr.warmup", None, 3)


class Counting:
    """A schedule that counts its calls."""

    def __init__(self, factor: float, *held: object) -> None:
        self.factor, self.held = factor, held
        self.calls, self.seen = 0, [0]

    def __call__(self, step: int) -> float:
        self.calls += 1
        self.seen[0] += 1
        return self.factor / step


@pytest.mark.parametrize("held", [(), (threading.RLock(),)])
def test_a_schedule_is_not_advanced_and_what_it_holds_is_not_copied(held: tuple[object, ...]) -> None:
    first, second = Counting(1.0, *held), Counting(2.0, *held)
    checkpoint = written(job(sgd(model()), schedule=first))
    (found,) = job(sgd(model()), schedule=second).resume(checkpoint, 0)
    assert found == ChangedSetting("schedule(1)", 1.0, 2.0)
    assert (first.calls, second.calls) == (0, 0)
    assert held or first.seen == second.seen == [0]


def test_a_function_where_there_was_none_is_named_and_not_spelled_out() -> None:
    def one(**more: Any) -> Groups:
        o = sgd(model())
        return job(o, schedule=torchs.CyclicLR(o, 1e-3, 0.1, 3, **more))

    (found,) = one(scale_fn=lambda x: 1 / x).resume(written(one()), 0)
    assert found == ChangedSetting("scale_fn_custom of CyclicLR", None, "a function")


def test_another_optimizer_is_refused_by_name() -> None:
    checkpoint = written(job(torch.optim.Adam(model().parameters())))
    other = job(torch.optim.AdamW(model().parameters()))
    refused(lambda: other.resume(checkpoint, AT), r"'AdamW'; allowed: the optimizers of the checkpoint, Adam")


def test_a_schedule_that_is_over_before_the_step_of_the_checkpoint_is_refused() -> None:
    m = model()
    o = sgd(m)
    groups = job(o, schedule=torchs.OneCycleLR(o, 0.3, total_steps=STEPS))
    trained(groups, m, 1, AT)
    o = sgd(model())
    with pytest.raises(ConfigError, match=r"OneCycleLR.*that can go on after step 5"):
        job(o, schedule=torchs.OneCycleLR(o, 0.3, total_steps=4)).resume(written(groups), AT)
