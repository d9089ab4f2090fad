"""Trainers of which something fails: each function is an entry for the fork server."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import ft_hsdp
from benchmarks.training import Waiting
from ft_hsdp.config import Config
from ft_hsdp.errors import FtHsdpError
from ft_hsdp.train.identity import IncarnationSource
from ft_hsdp.train.trainer import build_optimizer

VICTIM = 1  # the replica that fails, where only one does
LONE_HANGS_AT, FULL_AT = 3, 4  # batches before that
LOWEST = 16  # descriptors
POISON = (1, 3)  # data shard, index
FOREVER_S = 3600.0

Fault = Callable[[int, int], None]  # what happens, by replica and number of the batch, before the forward


class Data:
    """Ones; the batch POISON has another value."""

    def __init__(self, odd: float = 1.0) -> None:
        self._odd = odd

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Tensor:
        return torch.full((1,), self._odd if (shard, index) == POISON else 1.0)


def full(config: Config, replica: IncarnationSource, run: Path) -> int:
    """Has no descriptor left, in the first life of the victim."""

    def use_up(number: int, batch: int) -> None:
        if number == VICTIM and batch == FULL_AT and _first(run):
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            # The lowest descriptors were opened first and stay open. The ring's have higher numbers, so those that
            # a broken ring gives back cannot be used again.
            while os.dup(0) < LOWEST:
                pass
            resource.setrlimit(resource.RLIMIT_NOFILE, (LOWEST, hard))

    return _train(config, replica, run, use_up)


def lone(config: Config, replica: IncarnationSource, run: Path) -> int:
    """A replica of two ranks that hangs in each of its first lives, each time in another way."""
    call = replica.poll()
    life = -1 if call is None else call.restarts
    rank = int(os.environ["RANK"])
    if life == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if life == 1 and rank == 0:
        time.sleep(FOREVER_S)  # no other rank can check in, and nothing is stopped

    def hang(_: int, batch: int) -> None:
        if life == 2 and batch == LONE_HANGS_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if life == 3 and batch == LONE_HANGS_AT:
            time.sleep(FOREVER_S)

    return _train(config, replica, run, hang)


def poisoned(config: Config, replica: IncarnationSource, run: Path) -> int:
    """One of the batches never has a finite gradient, or one of a size like that of the others."""
    odd = float("inf") if config.train.norm_mads is None else 1000.0
    return _train(config, replica, run, lambda *_: None, Data(odd))


def unweighed(config: Config, replica: IncarnationSource, run: Path) -> int:
    """Never says what a micro-batch weighs."""
    return _train(config, replica, run, lambda *_: None)


def _first(run: Path) -> bool:
    """Whether this is asked for the first time in this run."""
    mark = run / "failed_once"
    first = not mark.exists()
    mark.touch()
    return first


def _train(config: Config, replica: IncarnationSource, run: Path, fault: Fault, data: Data | None = None) -> int:
    try:
        job = ft_hsdp.join(config, replica, run)
        model = job.shard(Waiting(2, 256, 0.02))
        optim = job.optimizer(build_optimizer(config, list(model.parameters())))
        job.warm_up(lambda: model(None).backward())
        for number, batch in enumerate(job.batches(data or Data())):
            fault(job.replica, number)
            (model(batch) * batch[0]).backward()
            optim.step()
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0
