"""The sums of one step, added again in one process as the job's rings have added them.

Replicas of one width add rank by rank (`equal_sums`), replicas of unequal width lane by lane (`lane_sums`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.ftar.connections import LaneRing
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.train.gradients import checksum, sum_of_squares
from ft_hsdp.train.lanes import GradientLanes, LanePlan
from ft_hsdp.train.replay.lanes import gathered, ring_sum, sum_part

Rows = Sequence[Sequence[tuple[str, tuple[int, ...]]]]
"""Of each bucket, the parameters in order: (name, whole shape)."""


@dataclass(frozen=True, slots=True)
class StepSums:
    reduced: list[list[Tensor]]  # for each rank of the widest member, the flat shard of each bucket
    digest: str  # of what all ranks, or lanes, have voted on
    square: float  # the sum of squares, added in the order of ranks, or lanes


def equal_sums(
    gradients: Mapping[int, Sequence[Sequence[Tensor]]], record: CommitRecord, rows: Rows, settings: Settings
) -> StepSums:
    """Return the sums of a step whose members were equally wide.

    Args:
        gradients: Of each contributor, for each of its ranks a flat shard of each bucket, fp32.
        record: The commit.
        rows: What the buckets hold.
        settings: Of the rings.
    """
    width = len(next(iter(gradients.values())))
    reduced = [
        [
            ring_sum(
                {replica: shards[rank][bucket] for replica, shards in gradients.items()}, record.ring, settings
            )
            for bucket in range(len(rows))
        ]
        for rank in range(width)
    ]
    return StepSums(reduced, *_voted(reduced))


def lane_sums(
    gradients: Mapping[int, Sequence[Sequence[Tensor]]], record: CommitRecord, rows: Rows, settings: Settings
) -> StepSums:
    """Return the sums of a step whose members were not equally wide.

    Args:
        gradients: Of each contributor, for each of its ranks a flat shard of each bucket, fp32.
        record: The commit, with `ring_widths`.
        rows: What the buckets hold.
        settings: Of the rings.
    """
    widest = max(record.ring_widths)
    plans = {width: _plans(rows, width, record.ring_widths) for width in record.ring_widths}
    owned = {
        width: {lane.ring.number: (rank, lane) for rank, plan in enumerate(of_ranks) for lane in plan.lanes}
        for width, of_ranks in plans.items()
    }
    reduced = [[torch.zeros(_size(bucket, widest)) for bucket in rows] for _ in range(widest)]
    summed: dict[int, list[Tensor]] = {number: [] for number in sorted(owned[widest])}
    for rank, plan in enumerate(plans[widest]):
        for bucket, flat in enumerate(reduced[rank]):
            for _, lane, part in plan.of(bucket):
                theirs = {}
                for replica, shards in gradients.items():
                    at, its = owned[len(shards)][lane.ring.number]
                    theirs[replica] = gathered(its.parts[bucket], shards[at][bucket])
                summed[lane.ring.number] += sum_part(part, theirs, flat, record.ring, settings)
    return StepSums(reduced, *_voted(summed.values()))


def _voted(parts: Iterable[Sequence[Tensor]]) -> tuple[str, float]:
    """Return the digest and the sum of squares of what was voted on: the sums of each rank or lane, by bucket."""
    outs = list(parts)
    digests = [state_id.digest([checksum(out) for out in each]) for each in outs]
    squares = [sum_of_squares(each, [((0, out.numel()),) for out in each]) for each in outs]
    return state_id.digest(digests), float(sum(squares))


def _plans(rows: Rows, width: int, widths: Sequence[int]) -> list[LanePlan]:
    """Return the lanes of each rank of a replica of ``width`` ranks."""
    usual = LaneRing(0, "")  # for members of equal width, which these are not
    ranks = [GradientLanes(rows, (), usual, width, rank) for rank in range(width)]
    return [plan for each in ranks if (plan := each.plan(widths)) is not None]


def _size(bucket: Sequence[tuple[str, tuple[int, ...]]], width: int) -> int:
    """Return the elements of a rank's flat shard, with the rows that fill it up."""
    return sum(-(-shape[0] // width) * prod(shape[1:]) for _, shape in bucket)
