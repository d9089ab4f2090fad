"""Where each tensor of a rank's shard lies in one packed buffer, and the copies into the buffer and back.

The layout follows from this rank's own model and optimizer, never from a peer: a state is accepted only if its
layout is the one that is expected here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import PackedTensor

ALIGN = 64  # bytes; every tensor begins at a multiple
PIECE = 256 << 10  # bytes that are copied and hashed together, so that they are in the CPU's cache the second time


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one rank's shard in a packed buffer."""

    tensors: tuple[PackedTensor, ...]  # in order of their offsets
    nbytes: int  # of the packed buffer

    @staticmethod
    def of(params: Mapping[str, torch.Tensor], optim: Mapping[str, torch.Tensor]) -> Layout:
        """Return the layout of parameters and optimizer tensors, by name. They may be DTensors or plain ones."""
        tensors: list[PackedTensor] = []
        offset = 0
        for kind, named in (("param", params), ("optim", optim)):
            for name, tensor in named.items():
                flat = local(tensor)
                nbytes = flat.numel() * flat.element_size()
                dtype = str(flat.dtype).removeprefix("torch.")
                tensors.append(
                    PackedTensor(name, kind, dtype, tuple(flat.shape), tuple(tensor.shape), offset, nbytes)
                )
                offset += -(-nbytes // ALIGN) * ALIGN
        return Layout(tuple(tensors), offset)

    @property
    def fingerprint(self) -> str:
        """Hash of all names, types, shapes and offsets. A fetched shard must have the same."""
        return shard_manifest.fingerprint(self.tensors)

    def within(self, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
        """Return what lies in the packed bytes [start, stop).

        Returns:
            (index of the tensor, begin, end) for each piece, in bytes of that tensor.
        """
        cut = ((i, max(start - t.offset, 0), min(stop - t.offset, t.nbytes)) for i, t in enumerate(self.tensors))
        return tuple((i, a, b) for i, a, b in cut if a < b)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, or the tensor itself, detached."""
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard.detach()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as uint8 [nbytes]. A tensor that is not contiguous is copied."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def pack(layout: Layout, sources: Sequence[torch.Tensor], buffer: torch.Tensor) -> tuple[str, ...]:
    """Copy local shards, from any device, into ``buffer`` uint8 [layout.nbytes]. Padding becomes zero.

    Returns:
        The checksum of each chunk (`ShardManifest.checksums`). For tensors in host memory it is computed from the
        tensors, not from the buffer, so a byte that is damaged on its way or in the buffer shows.
    """
    packed: Any = buffer.numpy()
    sums = shard_manifest.RunningChecksums()
    end = 0
    for place, source in zip(layout.tensors, sources, strict=True):
        _copy(np.zeros(place.offset - end, dtype=np.uint8), packed[end : place.offset], sums)
        end = place.offset + place.nbytes
        if not place.nbytes:
            continue
        into, held = packed[place.offset : end], as_bytes(local(source))
        if held.device.type != "cpu":
            buffer[place.offset : end].copy_(held)
            held = buffer[place.offset : end]
        _copy(held.numpy(), into, sums)
    _copy(np.zeros(layout.nbytes - end, dtype=np.uint8), packed[end:], sums)
    return sums.end()


def _copy(source: Any, target: Any, sums: shard_manifest.RunningChecksums) -> None:
    """Copy ``source`` to ``target`` piece by piece, and add each piece to ``sums``."""
    begin = 0
    while begin < len(source):
        piece = source[begin : begin + min(sums.remaining, PIECE)]
        np.copyto(target[begin : begin + len(piece)], piece)
        sums.add(piece.data)
        begin += len(piece)


def unpack(layout: Layout, buffer: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy the shards in ``buffer`` into the live tensors ``targets``, on any device."""
    for place, target in zip(layout.tensors, targets, strict=True):
        if place.nbytes:
            piece = buffer[place.offset : place.offset + place.nbytes]
            flat = local(target)
            flat.copy_(piece.view(flat.dtype).view(flat.shape))
