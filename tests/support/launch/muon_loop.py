"""A user's loop with two optimizers, torch's schedulers, parameter groups and a clip of one of them.

It calls ``scheduler.step()`` after each step, as loops of torch do, and writes what it saw last into the folder
SEEN. With ``--many`` it has an optimizer for each kind of schedule. With ``--exact`` no sum of its gradients is
ever rounded, so they do not depend on the number of ranks, which add in another order. The products of Muon do, so
AdamW has its place then.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import ft_hsdp
from docs.examples.own_loop import Classifier, Pair, Spirals
from tests.support.slow_script import pause

STEP_S = 0.1  # so that a replica that is killed comes back before the end
RATES = (0.02, 3e-3)


def schedules(muon: torch.optim.Optimizer, adam: torch.optim.Optimizer) -> list[LRScheduler]:
    """Those of Muon warm up; that of AdamW falls."""
    warm, cosine = LinearLR(muon, 0.1, 1.0, 8), CosineAnnealingLR(muon, 400, 1e-4)
    return [SequentialLR(muon, [warm, cosine], [8]), StepLR(adam, 5, 0.9)]


class Exact(Classifier):
    """Each layer sees whole numbers, and its gradient is their sum, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[1] = nn.Identity()  # type: ignore[operator]

    def forward(self, batch: Pair) -> Tensor:
        """A number without a meaning."""
        numbers = whole(batch)
        wide = numbers[:, :1].repeat(1, self.outer.in_features) * torch.arange(-2, 2).repeat(16)
        made = [self.inner(numbers), *(block(wide) for block in self.blocks), self.outer(wide)]
        return torch.cat([each.flatten() for each in made]).sum()


def whole(batch: Pair) -> Tensor:
    """The points of a batch as small whole numbers."""
    return batch[0].mul(4).round()


def many(job: ft_hsdp.Job, model: Classifier, steps: int) -> tuple[list[torch.optim.Optimizer], list[LRScheduler]]:
    """An optimizer for each kind of schedule; the last one has its rate from a callback."""
    layers = [each for each in model.blocks.modules() if isinstance(each, nn.Linear)]
    kind = torch.optim.AdamW if isinstance(model, Exact) else torch.optim.Muon
    muon = kind([layer.weight for layer in layers], lr=RATES[0])
    plateau = torch.optim.AdamW([model.inner.weight], lr=0.01)
    falling = torch.optim.SGD([model.inner.bias], lr=0.01, momentum=0.9)
    cosine = torch.optim.Adam([model.outer.weight], lr=0.01)
    cycle = torch.optim.SGD([model.outer.bias], lr=0.01, momentum=0.9)
    by_hand = torch.optim.AdamW([layer.bias for layer in layers], lr=0.01)

    @job.on_commit
    def slow_down(step: ft_hsdp.CommittedStep) -> None:
        if step.step % 4 == 0:
            by_hand.param_groups[0]["lr"] *= 0.7

    return [muon, plateau, falling, cosine, cycle, by_hand], [
        schedules(muon, plateau)[0],
        ReduceLROnPlateau(plateau, factor=0.5, patience=1),
        ExponentialLR(falling, 0.93),
        CosineAnnealingLR(cosine, steps),
        OneCycleLR(cycle, 0.1, total_steps=steps),
    ]


class Parts(Spirals):
    """The same micro-batches for a replica, whether its ranks share them out or one rank has them one by one."""

    def __init__(self, job: ft_hsdp.Job) -> None:
        super().__init__(job.config.train.micro_batch, job.config.train.seed)
        self.accumulate = job.config.train.accumulate

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Pair:
        """As that of `Spirals`."""
        return super().batch(shard, index, rank * self.accumulate + micro)


def main() -> None:
    """Train until the job ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seen", type=Path)
    parser.add_argument("--many", action="store_true")
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()

    job = ft_hsdp.join()
    torch.manual_seed(job.config.train.seed)
    model: Any = job.shard(Exact() if args.exact else Classifier())
    if args.many:
        optimizers, schedulers = many(job, model, job.config.train.steps)
    else:
        blocks = [p for p in model.blocks.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if not any(p is q for q in blocks)]
        muon = torch.optim.Muon(blocks, lr=RATES[0])
        groups = [{"params": rest[:2], "clip": 0.05}, {"params": rest[2:], "lr": 1e-3}]
        adam = torch.optim.AdamW(groups, lr=RATES[1])
        optimizers, schedulers = [muon, adam], schedules(muon, adam)
    optim = job.optimizer(optimizers, schedulers)
    optim.clip = None if args.exact else 1.0
    for batch in job.batches(Parts(job)):
        pause(STEP_S)
        loss = model(batch)
        loss.backward()
        optim.step(whole(batch).mean() if args.exact else loss)
        for scheduler in schedulers:
            scheduler.step()
    seen = {"epochs": [s.last_epoch for s in schedulers], "rates": [s.get_last_lr() for s in schedulers]}
    (args.seen / f"{job.replica}-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
