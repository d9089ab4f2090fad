"""The models of the jobs under test, and their data: the same for every contender."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ft_hsdp.bench.recovery.scene import Scene
from ft_hsdp.bench.waiting import Nothing, Waiting

WORDS = 257  # bytes, and the end of a text
SEQ_LEN, MICRO_BATCH = 128, 4
DIM, FFN_DIM, LAYERS, HEADS = 160, 448, 6, 5  # as in configs/quickstart.yaml


class Data(Protocol):
    """Batches by their place."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> object:
        """One of them."""


class Words:
    """Random tokens, the same for the same place."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens and those that follow them, [MICRO_BATCH, SEQ_LEN] each."""
        place = torch.Generator().manual_seed((shard * 1_000_003 + index) * 64 + rank)
        tokens = torch.randint(WORDS, (MICRO_BATCH, SEQ_LEN + 1), generator=place)
        return tokens[:, :-1], tokens[:, 1:]


def model(scene: Scene) -> nn.Module:
    """The model of a scene, not sharded."""
    if not scene.transformer:
        return Waiting(scene.layers, scene.elements, scene.wait_s)
    from ft_hsdp.train.model import ModelArgs, Transformer  # who waits starts without it

    return Transformer(ModelArgs(WORDS, DIM, LAYERS, HEADS, HEADS, FFN_DIM, SEQ_LEN))


def data(scene: Scene) -> Data:
    """What it is trained on."""
    return Words() if scene.transformer else Nothing()
