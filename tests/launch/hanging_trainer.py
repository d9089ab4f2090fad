"""A trainer that hangs once, in the first life of replica 1: an entry for the fork server."""

from __future__ import annotations

import time
from pathlib import Path

import ft_hsdp
from ft_hsdp.bench.waiting import Nothing, Waiting
from ft_hsdp.config import Config
from ft_hsdp.errors import FtHsdpError
from ft_hsdp.train.calling import Calling
from ft_hsdp.train.trainer import build_optimizer

VICTIM, HANGS_AT = 1, 6


def main(config: Config, replica: Calling, run: Path) -> int:
    try:
        job = ft_hsdp.join(config, replica, run)
        model = job.shard(Waiting(2, 256, 0.02))
        optim = job.optimizer(build_optimizer(config, list(model.parameters())))
        job.warm_up(lambda: model(None).backward())
        for number, batch in enumerate(job.batches(Nothing())):
            if job.replica == VICTIM and number == HANGS_AT and not (run / "hung").exists():
                (run / "hung").touch()
                time.sleep(3600)
            model(batch).backward()
            optim.step()
    except FtHsdpError as error:
        return error.exit_code
    return 0
