"""The models of the jobs under test, and their data: the same for every contender.

The training loop of the jobs under test: the public API around the model of a scene.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

import ft_hsdp
from ft_hsdp.bench.recovery.scene import FILE, RecoveryScene
from ft_hsdp.bench.waiting import Nothing, Waiting
from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_LEFT, FtHsdpError
from ft_hsdp.train.identity import IncarnationSource
from ft_hsdp.train.trainer import build_optimizer

WORDS = 257  # bytes, and the end of a text
SEQ_LEN, MICRO_BATCH = 128, 4
DIM, FFN_DIM, LAYERS, HEADS = 160, 448, 6, 5  # as in configs/quickstart.yaml


class Data(Protocol):
    """Batches by their place."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> object:
        """Return one micro-batch of a rank."""


class Words:
    """Random tokens, the same for the same place."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens and those that follow them, [MICRO_BATCH, SEQ_LEN] each."""
        place = torch.Generator().manual_seed((shard * 1_000_003 + index) * 64 + rank)
        tokens = torch.randint(WORDS, (MICRO_BATCH, SEQ_LEN + 1), generator=place)
        return tokens[:, :-1], tokens[:, 1:]


def make_model(scene: RecoveryScene) -> nn.Module:
    """The model of a scene, not sharded."""
    if not scene.transformer:
        return Waiting(scene.layers, scene.elements, scene.wait_s)
    from ft_hsdp.train.model import ModelArgs, Transformer  # who waits starts without it

    return Transformer(ModelArgs(WORDS, DIM, LAYERS, HEADS, HEADS, FFN_DIM, SEQ_LEN))


def make_data(scene: RecoveryScene) -> Data:
    """What it is trained on."""
    return Words() if scene.transformer else Nothing()


def main(config: Config, replica: int | IncarnationSource, run: Path) -> int:
    """Run one rank until it is told to leave; the exit code."""
    scene = RecoveryScene(**json.loads((Path(config.job.runs_dir) / FILE).read_text()))
    try:
        job = ft_hsdp.join(config, replica, run)
        data = make_data(scene)
        model = job.shard(make_model(scene))
        optim = job.optimizer(build_optimizer(config, list(model.parameters())))
        job.warm_up(lambda: model(data.batch(0, 0, job.rank)).backward())
        signal.signal(signal.SIGTERM, lambda *_: job.leave())
        for batch in job.batches(data):
            model(batch).backward()
            optim.step()
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_LEFT
