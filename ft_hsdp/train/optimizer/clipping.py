"""Parameter groups with a ``clip`` of their own: the norm of a group, over all ranks of the replica.

Every replica has to find the same norm, to the last bit. Replicas that are equally wide add squares rank by rank.
Replicas of unequal width add them lane by lane (`memory.lanes`): the rows of a lane are on one rank of each of
them, so its squares are added in one order everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from ft_hsdp.memory.lanes import RowLane, lanes
from ft_hsdp.train.state.packing import local

CLIP_EPS = 1e-6
PIECE = 1 << 14  # elements that are squared at once: as fp64 they fit a core's cache, and one thread adds them
ROW = 1 << 12  # elements whose squares are added in fp32, which is three times as fast
SURE = 1e-24, 1e30  # between these a sum of squares of fp32 has neither overflowed nor lost what is small


def clip_groups(groups: Sequence[Mapping[str, Any]], widths: Sequence[int]) -> None:
    """Clip the gradients of each group that has a ``clip``, in place; a collective of the replica if any has one.

    Args:
        widths: `CommitRecord.ring_widths`: the ranks of each member; () if they are equally wide.
    """
    clipped = [(group["clip"], _gradients(group)) for group in groups if group.get("clip") is not None]
    if not clipped:
        return
    grads = [of_group for _, of_group in clipped]
    squares = _by_lanes(grads, widths) if widths else _by_ranks(grads)
    for (clip, of_group), each in zip(clipped, squares, strict=True):
        norm = math.sqrt(each)
        if norm > clip:
            for grad in of_group:
                local(grad).mul_(clip / (norm + CLIP_EPS))


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a tensor, in fp64, as a 0-dimensional tensor on its device.

    On a CPU it has the same bits wherever the tensor lies in memory, and with any number of threads. Of fp32 the
    norms of rows are in fp32, and their squares are added in fp64. A whole copy in fp64, which torch makes for the
    norm in another type, would take ten times as long.
    """
    if values.device.type != "cpu":
        return torch.linalg.vector_norm(values, dtype=torch.float64) ** 2
    if values.dtype == torch.float32:
        flat = values.reshape(-1)
        whole = flat.numel() // ROW * ROW
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1).tolist()
        rows.append(float(torch.linalg.vector_norm(flat[whole:].double())))
        found = math.fsum(row * row for row in rows)  # exact, so its order does not matter
        if SURE[0] < found < SURE[1]:
            return torch.tensor(found, dtype=torch.float64)
    wide = torch.empty(min(PIECE, values.numel()), dtype=torch.float64)
    total = 0.0
    for piece in values.reshape(-1).split(PIECE):
        total += float(torch.linalg.vector_norm(wide[: piece.numel()].copy_(piece))) ** 2
    return torch.tensor(total, dtype=torch.float64)


def lanes_of(shapes: Sequence[Sequence[int]], widths: Sequence[int]) -> tuple[RowLane, ...]:
    """Return the lanes of the gradients of a group; their tensors are named by place."""
    return lanes({str(place): (tuple(shape), 4) for place, shape in enumerate(shapes)}, widths)


def lane_squares(
    shards: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], of: Sequence[RowLane], width: int, rank: int
) -> list[float]:
    """Return the sum of squares of each lane, in fp64; 0 for those of other ranks."""
    found = []
    for lane in of:
        total = 0.0
        for rows in lane.rows if lane.owner(width) == rank else ():
            place = int(rows.tensor)
            first = rank * -(-shapes[place][0] // width)
            part = shards[place][rows.start - first : rows.stop - first]
            # A copy: where a slice begins in memory may decide how a device adds it.
            total += float(square_sum(part if part.device.type == "cpu" else part.clone()))
        found.append(total)
    return found


def _by_lanes(grads: Sequence[Sequence[torch.Tensor]], widths: Sequence[int]) -> list[float]:
    width, rank = dist.get_world_size(), dist.get_rank()
    shapes = [[grad.shape for grad in of_group] for of_group in grads]
    divided = [lanes_of(each, widths) for each in shapes]
    mine = [
        value
        for of_group, each, of in zip(grads, shapes, divided, strict=True)
        for value in lane_squares([local(grad) for grad in of_group], each, of, width, rank)
    ]
    device = next((grad.device for of_group in grads for grad in of_group), None)
    told = [each.tolist() for each in _gathered(torch.tensor(mine, dtype=torch.float64, device=device))]
    found, place = [], 0
    for of in divided:
        found.append(float(sum(told[lane.owner(width)][place + n] for n, lane in enumerate(of))))
        place += len(of)
    return found


def _by_ranks(grads: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    mine = torch.stack([_squares(of_group) for of_group in grads])
    return [sum(squares) for squares in zip(*(each.tolist() for each in _gathered(mine)), strict=True)]


def _gathered(mine: torch.Tensor) -> list[torch.Tensor]:
    if not dist.is_initialized():
        return [mine]
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    return ranks


def _gradients(group: Mapping[str, Any]) -> list[torch.Tensor]:
    return [p.grad for p in group["params"] if p.grad is not None]


def _squares(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return this rank's part of the sum of squares, in fp64; what several ranks hold is shared out among them."""
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    for grad in grads:
        copies = 1
        if isinstance(grad, DTensor):
            placed = zip(grad.device_mesh.shape, grad.placements, strict=True)
            copies = math.prod(size for size, placement in placed if isinstance(placement, Replicate))
            if dist.is_initialized():  # tensor parallelism leaves a parameter alone: it is on a part of the ranks
                copies *= dist.get_world_size() // grad.device_mesh.size()
        total += square_sum(local(grad)) / copies
    return total
