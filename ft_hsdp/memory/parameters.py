"""Which part of a parameter each rank of a replica holds, for any mesh, and the few rows of a log that say so.

A mesh of ranks has dimensions; each of them cuts one dimension of a tensor as torch.chunk does, or none. Where two
of them cut the same one, the last of the mesh is first: FSDP2 cuts what tensor parallelism has cut.

    mesh (2, 2) = (fsdp, tp)        | rank 0 | rank 2 | rank 1 | rank 3 |        dimension 0, which both cut
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ft_hsdp.memory.shape import rows

MOST = 6000  # bytes of the rows of `folded`: an event has to fit into a row of the lighthouse's journal
_NUMBER = "*"

Block = tuple[tuple[int, int], ...]
"""Indices [begin, end) of each dimension."""


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter, and how the ranks of a replica share it."""

    shape: tuple[int, ...]  # of the whole parameter
    # Of each dimension of the mesh of all ranks, which are in row-major order: its size, and the dimension of the
    # parameter that it cuts; -1: each has all of it.
    cuts: tuple[tuple[int, int], ...]

    @property
    def ranks(self) -> int:
        """The ranks of the replica."""
        return math.prod(size for size, _ in self.cuts)

    def block(self, rank: int) -> Block:
        """Return the block that ``rank`` holds; it may be empty."""
        held = [(0, length) for length in self.shape]
        for size, dim in reversed(self.cuts):
            rank, at = divmod(rank, size)
            if dim >= 0:
                begin, end = held[dim]
                first, last = rows(end - begin, size, at)
                held[dim] = begin + first, begin + last
        return tuple(held)

    def element(self, flat: int) -> tuple[int, ...]:
        """Return the indices of the element at place ``flat`` of the whole parameter in row-major order."""
        found: list[int] = []
        for length in reversed(self.shape):
            flat, at = divmod(flat, length)
            found.append(at)
        return tuple(reversed(found))


def folded(parameters: Mapping[str, CutParameter]) -> list[list[Any]]:
    """Return ``parameters`` as rows of JSON. Those of equal layers, or experts, are one row.

    Returns:
        Rows [name with "*" for numbers, runs of each number, shape, cuts]; a run is [first, last]. [] if there are
        more than `MOST` bytes.
    """
    alike: dict[tuple[str, CutParameter], list[tuple[int, ...]]] = {}
    for name, parameter in parameters.items():
        words = name.split(".")
        numbers = tuple(int(word) for word in words if word.isdecimal())
        pattern = ".".join(_NUMBER if word.isdecimal() else word for word in words)
        alike.setdefault((pattern, parameter), []).append(numbers)
    found: list[list[Any]] = []
    for (pattern, parameter), each in alike.items():
        columns = [sorted(set(column)) for column in zip(*each, strict=False)]
        groups = [columns] if math.prod(map(len, columns)) == len(each) else [[[n] for n in one] for one in each]
        for group in groups:
            found.append([pattern, [_runs(column) for column in group], [*parameter.shape], [*parameter.cuts]])
    known = unfolded(found) == parameters  # not so with a name such as "01" or "*"
    return found if known and len(json.dumps(found)) <= MOST else []


def unfolded(rows: Iterable[Sequence[Any]]) -> dict[str, CutParameter]:
    """Return what `folded` has made ``rows`` of, by name."""
    found = {}
    for pattern, numbers, shape, cuts in rows:
        parameter = CutParameter(tuple(shape), tuple((size, dim) for size, dim in cuts))
        spread = [[n for first, last in runs for n in range(first, last + 1)] for runs in numbers]
        for each in itertools.product(*spread):
            values = iter(each)
            words = (str(next(values, "")) if word == _NUMBER else word for word in pattern.split("."))
            found[".".join(words)] = parameter
    return found


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return sorted ``numbers`` as runs [first, last]."""
    runs = itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0])
    together = [[number for _, number in run] for _, run in runs]
    return [[run[0], run[-1]] for run in together]
