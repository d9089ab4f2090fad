"""Lanes: how replicas of unequal width sum their gradients, row by row.

FSDP2 cuts dimension 0 of each tensor like `torch.chunk`: of W ranks, rank r has the rows from r * ceil(rows / W)
on. So in replicas of one width, rank r of each holds the same rows, and these ranks form a ring. In replicas of
several widths the rows that have the same owner in each width form a *lane*, with a ring of its own. All members
of that ring hold the whole lane, so they cut and add it alike, and their sums have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

Tensors = Mapping[str, tuple[tuple[int, ...], int]]
"""By name: the whole shape of a tensor, and the bytes of one of its elements."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows [start, stop) of one tensor, counted in the whole tensor."""

    tensor: str
    start: int
    stop: int
    elements: int


@dataclass(frozen=True, slots=True)
class RowLane:
    """The rows that have the same owner in each width."""

    widths: tuple[int, ...]  # the different ones, the largest first
    owners: tuple[int, ...]  # the rank that has the rows, in a replica of each of these widths
    rows: tuple[TensorRows, ...]  # in the order of the tensors; at most one piece of each

    @property
    def elements(self) -> int:
        return sum(rows.elements for rows in self.rows)

    def owner(self, width: int) -> int:
        """Return the rank that has the rows in a replica of `width` ranks.

        Args:
            width: number of ranks of a replica, one of `widths`.
        """
        return self.owners[self.widths.index(width)]


def lanes(tensors: Tensors, widths: Iterable[int]) -> tuple[RowLane, ...]:
    """Return the lanes of replicas of several widths.

    Args:
        tensors: by name, (shape, bytes of an element); cut in dimension 0.
        widths: the number of ranks of each replica; order and repetition change nothing.

    Returns:
        The lanes, sorted by their owners. With one width these are its ranks, but those that have no row.

    Raises:
        ValueError: there is no width, one is less than 1, or a tensor has no dimension to cut.
    """
    different = tuple(sorted(set(widths), reverse=True))
    if not different or different[-1] < 1:
        raise ValueError(f"widths: got {different}; allowed: at least one, each at least 1")
    found: dict[tuple[int, ...], list[TensorRows]] = {}
    for name, (shape, _) in tensors.items():
        if not shape:
            raise ValueError(f"tensor {name}: got no dimension; allowed: at least one, which is cut")
        rows, row = shape[0], prod(shape[1:])
        chunks = [-(-rows // width) for width in different]
        edges = sorted({0, rows, *(edge for chunk in chunks if chunk for edge in range(chunk, rows, chunk))})
        for start, stop in pairwise(edges):
            owners = tuple(start // chunk for chunk in chunks)
            found.setdefault(owners, []).append(TensorRows(name, start, stop, (stop - start) * row))
    return tuple(RowLane(different, owners, tuple(found[owners])) for owners in sorted(found))


def without_rows(tensors: Tensors, width: int) -> tuple[int, ...]:
    """Return the ranks that would have no row of any tensor: the tensors cannot be cut at that width.

    Args:
        tensors: by name, (shape, bytes of an element); cut in dimension 0.

    Returns:
        Numbers of ranks, in order.

    Raises:
        ValueError: the width is less than 1, or a tensor has no dimension to cut.
    """
    used = {lane.owner(width) for lane in lanes(tensors, (width,))}
    return tuple(rank for rank in range(width) if rank not in used)
