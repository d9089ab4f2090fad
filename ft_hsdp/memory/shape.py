"""How FSDP2 cuts a state over the ranks of a replica, and what a rank of another number of ranks takes from whom.

FSDP2 cuts the first dimension of a tensor as torch.chunk does. The rows of a rank follow each other in the memory
of the whole tensor, so what one rank of W has for one rank of W' is, of each tensor, one run of rows. Tensors that
are whole on each rank, such as AdamW's step counters, come from one rank for each receiver.

    a state of 4 ranks     | 0  1  2 | 3  4  5 | 6  7  8 | 9       |     rows of a tensor with 10 rows
    the same of 3 ranks    | 0  1  2  3 | 4  5  6  7 | 8  9        |

A *part* is what one rank of one width has for one rank of another width: its `Extent`s one after the other. Both
ends compute it from the shapes of the whole tensors alone, so no rank has to trust another one's offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

ALIGN = 64  # bytes; every tensor of a packed shard begins at a multiple

Cut = Literal["rows", "whole", "other"]
"""How a tensor is cut: by rows, as FSDP2 does; not at all, each rank has all of it; in another way."""


class Extent(NamedTuple):
    """Bytes that follow each other in both packed shards."""

    source: int  # offset in the shard that has them
    target: int  # offset in the shard that they are for
    nbytes: int


class RowRun(NamedTuple):
    tensor: int  # its number
    rows: int  # of it, of the whole tensor where that is not cut
    extent: Extent


@dataclass(frozen=True, slots=True)
class Tensor:
    shape: tuple[int, ...]  # of the whole tensor
    itemsize: int  # bytes of one element
    cut: Cut = "rows"

    @property
    def row_bytes(self) -> int:
        """The bytes of one row; of all of it if it has no dimension."""
        return math.prod(self.shape[1:]) * self.itemsize

    def rows(self, width: int, rank: int) -> tuple[int, int]:
        return rows(self.shape[0] if self.shape else 1, width, rank) if self.sliced else (0, self.length)

    @property
    def length(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def sliced(self) -> bool:
        """Whether each rank has rows of its own. What has no dimension cannot be cut."""
        return self.cut == "rows" and bool(self.shape)


def rows(count: int, width: int, rank: int) -> tuple[int, int]:
    """Return the rows [begin, end) of a tensor with ``count`` rows that rank ``rank`` of ``width`` has."""
    chunk = -(-count // width)
    return min(count, rank * chunk), min(count, (rank + 1) * chunk)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def giver(source_width: int, target: tuple[int, int]) -> int:
    """Return the rank of ``source_width`` that gives ``target``, (width, rank), what is not cut.

    It is one whose rows the target has, too, so that it need not ask a further rank.
    """
    width, rank = target
    return rank * source_width // width


def pieces(tensors: Sequence[Tensor], source: tuple[int, int], target: tuple[int, int]) -> tuple[RowRun, ...]:
    """Return what ``source`` has for ``target``, in order, one piece at most for each tensor.

    Args:
        tensors: Of the whole state, in the order in which shards have them. None is cut in another way.
        source: (width, rank) of the shard that is there.
        target: (width, rank) of the shard that is made.
    """
    whole = source[1] == giver(source[0], target)
    found: list[RowRun] = []
    at = to = 0  # where the tensor begins in each of the two shards
    for number, tensor in enumerate(tensors):
        (have, had), (want, wanted) = tensor.rows(*source), tensor.rows(*target)
        begin, end, size = max(have, want), min(had, wanted), tensor.row_bytes
        if begin < end and size and (tensor.sliced or whole):
            extent = Extent(at + (begin - have) * size, to + (begin - want) * size, (end - begin) * size)
            found.append(RowRun(number, end - begin, extent))
        at += aligned((had - have) * size)
        to += aligned((wanted - want) * size)
    return tuple(found)


def merged(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Return the same bytes in as few extents as there can be."""
    found: list[Extent] = []
    for each in extents:
        if found:
            last = found[-1]
            if (last.source + last.nbytes, last.target + last.nbytes) == (each.source, each.target):
                found[-1] = Extent(last.source, last.target, last.nbytes + each.nbytes)
                continue
        found.append(each)
    return tuple(found)


def needed(tensors: Sequence[Tensor], source_width: int, target: tuple[int, int]) -> tuple[int, ...]:
    """Return the ranks of ``source_width`` whose shards together have all that ``target`` has."""
    found = {giver(source_width, target)}
    for tensor in tensors:
        begin, end = tensor.rows(*target)
        if tensor.sliced and begin < end and tensor.row_bytes:
            chunk = -(-tensor.length // source_width)
            found.update(range(begin // chunk, (end - 1) // chunk + 1))
    return tuple(sorted(found))
