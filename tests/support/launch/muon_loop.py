"""A user's loop with two optimizers, torch's schedulers, parameter groups and a clip of one of them.

It calls ``scheduler.step()`` after each step, as loops of torch do, and writes what it saw last into the folder
SEEN.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

import ft_hsdp
from docs.examples.own_loop import Classifier, Spirals
from tests.support.slow_script import pause

STEP_S = 0.1  # so that a replica that is killed comes back before the end
RATES = (0.02, 3e-3)


def schedules(muon: torch.optim.Optimizer, adam: torch.optim.Optimizer) -> list[LRScheduler]:
    """Those of Muon warm up; that of AdamW falls."""
    warm, cosine = LinearLR(muon, 0.1, 1.0, 8), CosineAnnealingLR(muon, 400, 1e-4)
    return [SequentialLR(muon, [warm, cosine], [8]), StepLR(adam, 5, 0.9)]


def main() -> None:
    """Train until the job ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seen", type=Path)
    args = parser.parse_args()

    job = ft_hsdp.join()
    data = Spirals(job.config.train.micro_batch, job.config.train.seed)
    torch.manual_seed(job.config.train.seed)
    model = job.shard(Classifier())
    blocks = [p for p in model.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is q for q in blocks)]
    muon = torch.optim.Muon(blocks, lr=RATES[0])
    adam = torch.optim.AdamW([{"params": rest[:2], "clip": 0.05}, {"params": rest[2:], "lr": 1e-3}], lr=RATES[1])
    schedulers = schedules(muon, adam)
    optim = job.optimizer([muon, adam], schedulers)
    optim.clip = 1.0
    for batch in job.batches(data):
        pause(STEP_S)
        model(batch).backward()
        optim.step()
        for scheduler in schedulers:
            scheduler.step()
    seen = {"epochs": [s.last_epoch for s in schedulers], "rates": [s.get_last_lr() for s in schedulers]}
    (args.seen / f"{job.replica}-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
