"""A replica that hangs in each of its first lives, each time in another way: an entry for the fork server."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import ft_hsdp
from ft_hsdp.bench.waiting import Nothing, Waiting
from ft_hsdp.config import Config
from ft_hsdp.errors import FtHsdpError
from ft_hsdp.train.calling import Calling
from ft_hsdp.train.trainer import build_optimizer

HANGS_AT = 3


def main(config: Config, replica: Calling, run: Path) -> int:
    call = replica.heard()
    life = -1 if call is None else call.restarts
    rank = int(os.environ["RANK"])
    if life == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if life == 1 and rank == 0:
        time.sleep(3600)  # no other rank can check in, and nothing is stopped
    try:
        job = ft_hsdp.join(config, replica, run)
        model = job.shard(Waiting(2, 256, 0.02))
        optim = job.optimizer(build_optimizer(config, list(model.parameters())))
        job.warm_up(lambda: model(None).backward())
        for number, batch in enumerate(job.batches(Nothing())):
            if life == 2 and number == HANGS_AT and rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            if life == 3 and number == HANGS_AT:
                time.sleep(3600)
            model(batch).backward()
            optim.step()
    except FtHsdpError as error:
        return error.exit_code
    return 0
