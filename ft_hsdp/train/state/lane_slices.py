"""The slice of the state that replicas of unequal width compare: of each lane a sixteenth (`core.state_id`).

Ranks with one number hold other rows there, and so other bytes. But all owners of a lane hold its rows: of the
parameters, and of what the optimizer keeps for them. What is not cut, such as counters of steps, is in the first
lane of the replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import xxhash

from ft_hsdp.core import state_id
from ft_hsdp.memory.lanes import lanes
from ft_hsdp.train.lanes import LanePlan

Pieces = list[tuple[int, int, int]]  # (index of the tensor, begin, end) in bytes of the rank's shard of it


def pieces(
    plan: LanePlan,
    shapes: Sequence[tuple[int, ...] | None],
    sizes: Sequence[tuple[int, int]],
    width: int,
    rank: int,
) -> list[Pieces]:
    """Return what each lane of a rank has of the state.

    Args:
        shapes: Of each tensor of the state the whole shape; None: it is not cut along dimension 0.
        sizes: Of what this rank holds of each: (bytes, bytes of an element).

    Returns:
        For each lane, in the order of the plan. Rows whose owners have no lane of the gradient are in none.
    """
    found: dict[tuple[int, ...], Pieces] = {lane.owners: [] for lane in plan.lanes}
    for index, (shape, (nbytes, itemsize)) in enumerate(zip(shapes, sizes, strict=True)):
        if shape is None:
            found.get((0,) * len(plan.widths), []).append((index, 0, nbytes))
            continue
        row, first = itemsize * prod(shape[1:]), rank * -(-shape[0] // width)
        for lane in lanes({"": (shape, itemsize)}, plan.widths):
            if lane.owner(width) == rank and lane.owners in found:
                (rows,) = lane.rows
                found[lane.owners].append((index, (rows.start - first) * row, (rows.stop - first) * row))
    return list(found.values())


def digest(step: int, mine: Pieces, shards: Sequence[torch.Tensor], more: bytes) -> str:
    """Return the xxh3-128 of the slice of a lane that is compared after ``step`` steps, in hex."""
    hashed, place = xxhash.xxh3_128(), 0
    begin, end = state_id.slice_bounds(sum(b - a for _, a, b in mine), step)
    for index, a, b in mine:
        start, stop = max(a, a + begin - place), min(b, a + end - place)
        if start < stop:
            piece: Any = shards[index][start:stop].cpu().numpy()
            hashed.update(piece.data)
        place += b - a
    hashed.update(more)
    return hashed.hexdigest()
