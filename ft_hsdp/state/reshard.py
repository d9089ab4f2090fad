"""Reshard: which bytes of the shards of a state, cut for W ranks, make up a shard cut for W' ranks. Pure.

FSDP2 cuts a tensor by rows (dimension 0): each rank gets ceil(rows / W) of them, the later ones fewer or none. A
tensor that is not cut (an optimizer's step, a buffer) is whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.wire import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` bytes at ``offset`` in the shard of rank ``source`` belong at ``target`` in the new one."""

    source: int
    offset: int
    target: int
    nbytes: int


def rows(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [first, end) of ``total`` that FSDP2 gives ``rank`` of ``ranks``."""
    size = -(-total // ranks)
    return min(rank * size, total), min((rank + 1) * size, total)


def pieces(
    target: Sequence[Tensor], rank: int, ranks: int, sources: Sequence[Sequence[Tensor]]
) -> tuple[Piece, ...]:
    """What makes up the shard of ``rank`` of ``ranks``, in the order of its bytes; contiguous ones are one piece.

    ``target`` are the tensors of that shard, ``sources`` those of each rank of the state that is there. Bytes that
    no piece covers are padding. What is whole everywhere is taken from one source, by each rank from another.

    Raises:
        DataCorruption: the shards are not of the same tensors, or one is not cut by rows.
    """
    found: list[Piece] = []
    for place, tensor in enumerate(target):
        held = []
        for source, shard in enumerate(sources):
            if len(shard) != len(target) or _same(shard[place]) != _same(tensor):
                raise DataCorruption(f"rank {source} of the other layout does not have tensor {tensor.name!r}")
            held.append((shard[place], *_span(shard[place], source, len(sources))))
        turn = rank % len(sources)
        for piece in _cut(tensor, _span(tensor, rank, ranks), held, turn):
            last = found[-1] if found else None
            if (
                last is not None
                and last.source == piece.source
                and last.offset + last.nbytes == piece.offset
                and last.target + last.nbytes == piece.target
            ):
                found[-1] = replace(last, nbytes=last.nbytes + piece.nbytes)
            else:
                found.append(piece)
    return tuple(found)


def _cut(
    tensor: Tensor, span: tuple[int, int], held: Sequence[tuple[Tensor, int, int]], turn: int
) -> Iterator[Piece]:
    """The pieces of one tensor: from row to row, always from a rank that has the next one."""
    width = _width(tensor)
    row, end = span
    order = [*range(turn, len(held)), *range(turn)]
    while row < end and width:
        source = next(s for s in order if held[s][1] <= row < held[s][2])
        there, first, last = held[source]
        count = min(last, end) - row
        offset = there.offset + (row - first) * width
        yield Piece(source, offset, tensor.offset + (row - span[0]) * width, count * width)
        row += count


def _same(tensor: Tensor) -> tuple[object, ...]:
    return tensor.name, tensor.kind, tensor.dtype, tensor.global_shape


def _width(tensor: Tensor) -> int:
    """Bytes of a row; 0 where there is nothing."""
    count = math.prod(tensor.shape)
    return tensor.nbytes // count * math.prod(tensor.shape[1:]) if count else 0


def _span(tensor: Tensor, rank: int, ranks: int) -> tuple[int, int]:
    """The rows of the whole that a rank's shard has; a scalar is one row."""
    if tensor.shape == tensor.global_shape:
        return 0, tensor.shape[0] if tensor.shape else 1
    if not tensor.shape or tensor.shape[1:] != tensor.global_shape[1:]:
        raise DataCorruption(f"tensor {tensor.name!r} is not cut by rows")
    first, end = rows(tensor.global_shape[0], rank, ranks)
    if tensor.shape[0] != end - first:
        raise DataCorruption(f"tensor {tensor.name!r} has {tensor.shape[0]} rows on rank {rank} of {ranks}")
    return first, end
