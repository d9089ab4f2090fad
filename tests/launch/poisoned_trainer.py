"""A trainer one of whose batches never has a finite gradient: an entry for the fork server."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import ft_hsdp
from ft_hsdp.bench.waiting import Waiting
from ft_hsdp.config import Config
from ft_hsdp.errors import FtHsdpError
from ft_hsdp.train.calling import Calling
from ft_hsdp.train.trainer import build_optimizer

POISON = (1, 3)  # data shard, index


class Data:
    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Tensor:
        return torch.full((1,), float("inf") if (shard, index) == POISON else 1.0)


def main(config: Config, replica: Calling, run: Path) -> int:
    try:
        job = ft_hsdp.join(config, replica, run)
        model = job.shard(Waiting(2, 256, 0.02))
        optim = job.optimizer(build_optimizer(config, list(model.parameters())))
        job.warm_up(lambda: model(None).backward())
        for batch in job.batches(Data()):
            (model(batch) * batch[0]).backward()
            optim.step()
    except FtHsdpError as error:
        return error.exit_code
    return 0
