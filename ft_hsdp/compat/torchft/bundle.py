"""Bundle: the tensors of one call as flat buffers, each of which is one ring operation.

How a list is cut depends on sizes and types alone, which are the same on all ranks; what a rank copies depends on
its own tensors: one that is contiguous, on the CPU and alone in its bundle is summed where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALONE = 2**20  # bytes up to which a copy costs less than an operation of its own, as measured


@dataclass(frozen=True, slots=True)
class Bundle:
    """``tensors`` of one type, and the contiguous CPU tensor that holds all of their elements in order."""

    tensors: tuple[Tensor, ...]
    flat: Tensor

    def settle(self, divisor: int) -> None:
        """Divide the sum by ``divisor``, and bring it to where the tensors are."""
        if divisor != 1:
            self.flat.div_(divisor)
        if self.tensors[0] is self.flat:
            return
        parts = self.flat.split([t.numel() for t in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
        for device in {t.device for t in self.tensors if t.device.type != "cpu"}:
            torch.accelerator.synchronize(device)


def bundles(tensors: Sequence[Tensor]) -> list[Bundle]:
    """``tensors`` as bundles: large ones alone, small ones of one type together, in the order of the list."""
    groups: dict[object, list[Tensor]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(i if tensor.nbytes >= ALONE else tensor.dtype, []).append(tensor)
    return [Bundle(tuple(group), _flat(group)) for group in groups.values()]


def _flat(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    if len(tensors) == 1 and first.device.type == "cpu" and first.is_contiguous():
        return first
    return torch.cat([t.detach().reshape(-1).to("cpu") for t in tensors])
