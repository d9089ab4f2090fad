from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.errors import ConfigError
from ft_hsdp.train.optimizer import Groups, create_state, finish


def record(
    weights: tuple[int, ...] = (1, 1), norm: float = 0.0, step: int = 1, lr_scale: float = 1.0
) -> CommitRecord:
    made = tuple(Contribution(r, w, r, 0) for r, w in enumerate(weights))
    return CommitRecord(1, 0, step, "0" * 32, tuple(range(len(weights))), 3, made, "d", norm, lr_scale)


def sums() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=g) for n in (5, 1, 0, 7)]


@pytest.mark.parametrize(("weights", "accumulate", "divisor"), [((1,), 1, 1), ((1, 1, 1), 1, 3), ((2, 3), 4, 20)])
def test_the_divisor_is_the_weights_of_the_contributors_times_the_micro_batches(
    weights: tuple[int, ...], accumulate: int, divisor: int
) -> None:
    got = sums()
    finish(record(weights), got, None, accumulate)
    assert all(torch.equal(a, b / divisor) for a, b in zip(got, sums(), strict=True))


@pytest.mark.parametrize(("clip", "clipped"), [(None, False), (0.25, True), (1e9, False)])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_gradient_is_clipped_by_the_norm_in_the_record(
    clip: float | None, clipped: bool, accumulate: int
) -> None:
    total = math.sqrt(sum(float(t.double().square().sum()) for t in sums()))
    got = sums()
    finish(record((1, 1), norm=total / 2), got, clip, accumulate)
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in got))
    assert norm == pytest.approx(clip if clipped else total / 2 / accumulate, rel=1e-4)


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
    step = g.optimizer.step
    g.optimizer.step = lambda: (used.append([x["lr"] for x in g.optimizer.param_groups]), step())[1]  # type: ignore
    before = g.hyper()
    for p in (p for x in g.optimizer.param_groups for p in x["params"]):
        p.grad = torch.ones_like(p)
    g.step(record(step=4, lr_scale=0.5))
    assert used == [[0.2 / 8, 0.1 / 8]]
    assert g.hyper() == before
    assert [h["lr"] for h in before] == [0.2, 0.1]


def test_without_a_schedule_only_lr_scale_counts() -> None:
    m = model()
    assert Groups(torch.optim.SGD(m.parameters(), lr=0.1), None).rates(record(step=9, lr_scale=0.5)) == [0.05]


def test_hyper_parameters_survive_json_and_are_adopted() -> None:
    g, other = groups(), groups()
    for group in g.optimizer.param_groups:
        group["lr"] *= 3
        group["betas"] = (0.8, 0.9)
    mine = Groups(g.optimizer, None)
    other.adopt(json.loads(json.dumps(mine.hyper())))
    assert other.hyper() == mine.hyper()
    assert other.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert other.rates(record()) == pytest.approx([0.6, 0.3])


def test_hyper_parameters_of_another_optimizer_are_refused() -> None:
    g = groups()
    for wrong in (g.hyper()[:1], ({**g.hyper()[0], "nesterov": True}, g.hyper()[1]), ({}, {})):
        with pytest.raises(ValueError, match="expected"):
            g.adopt(wrong)


@pytest.mark.parametrize("when", ["before the optimizer is wrapped", "afterwards"])
def test_a_torch_scheduler_is_refused(when: str) -> None:
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
    made = Groups(optimizer, None) if when == "afterwards" else None
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(ConfigError, match=r"a torch learning rate scheduler'; allowed: .*schedule"):
        (made or Groups(optimizer, None)).check()


def test_a_learning_rate_that_somebody_else_sets_is_refused() -> None:
    g = groups()
    g.check()
    g.optimizer.param_groups[1]["lr"] = 0.05
    with pytest.raises(ConfigError, match=r"learning rates \[0.2, 0.05\] instead of \[0.2, 0.1\]"):
        g.check()


def test_a_state_that_is_loaded_too_late_is_refused() -> None:
    g = groups()
    before = g.hyper()
    with pytest.raises(ConfigError, match=r"a state that is loaded before job.optimizer"):
        g.optimizer.load_state_dict(g.optimizer.state_dict())
    assert g.hyper() == before
