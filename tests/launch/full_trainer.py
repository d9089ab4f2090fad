"""A trainer that has no descriptor left, in the first life of replica 1: an entry for the fork server."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import ft_hsdp
from ft_hsdp.bench.waiting import Nothing, Waiting
from ft_hsdp.config import Config
from ft_hsdp.errors import FtHsdpError
from ft_hsdp.train.calling import Calling
from ft_hsdp.train.trainer import build_optimizer

VICTIM, FULL_AT = 1, 4


def main(config: Config, replica: Calling, run: Path) -> int:
    try:
        job = ft_hsdp.join(config, replica, run)
        model = job.shard(Waiting(2, 256, 0.02))
        optim = job.optimizer(build_optimizer(config, list(model.parameters())))
        job.warm_up(lambda: model(None).backward())
        for number, batch in enumerate(job.batches(Nothing())):
            if job.replica == VICTIM and number == FULL_AT and not (run / "full").exists():
                (run / "full").touch()
                _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                lowest = os.dup(0)  # all below it are open, and stay so
                os.close(lowest)
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            model(batch).backward()
            optim.step()
    except FtHsdpError as error:
        return error.exit_code
    return 0
