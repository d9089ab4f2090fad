"""A model whose forward and backward wait instead of computing, as a CPU does beside a busy accelerator."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD = 1 / 3  # of a layer's time; backward takes the rest


class Waiting(nn.Module):
    """`layers` layers of `elements` fp32 parameters each; forward and backward together wait `wait_s` seconds.

    Gradients are whole tensors, ready layer by layer, so that they are exchanged beside the rest of backward.
    """

    def __init__(self, layers: int, elements: int, wait_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(elements, wait_s / layers) for _ in range(layers))

    def shards(self) -> list[nn.Module]:
        """The modules to shard, each for itself."""
        return list(self.layers)

    def forward(self, batch: object) -> Tensor:
        """A scalar, whatever `batch` is."""
        hidden = torch.ones(1, requires_grad=True)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


class Nothing:
    """Data for the model: ones."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Tensor:
        """Return a batch of one number."""
        return torch.ones(1)


class _Layer(nn.Module):
    def __init__(self, elements: int, wait_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((elements,), 0.5))
        self._wait_s = wait_s

    def forward(self, hidden: Tensor) -> Tensor:
        return _Wait.apply(hidden, self._wait_s) * self.weight.mean()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        time.sleep(wait_s * FORWARD)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.wait_s * (1 - FORWARD))
        return grads[0], None
