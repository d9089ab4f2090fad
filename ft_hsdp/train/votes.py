"""What a rank votes on the sums of an attempt: who put what into them, their digest, and their square.

The sum of each bucket is looked at as soon as it is there (`look`), while later buckets are still reduced, so the
vote waits for the last one only. On a CPU that is an xxh3 and a norm in fp64, on this thread. On a GPU kernels do
both (`ftar_kernels.summary`), and the numbers are fetched when the vote is made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import Contribution, LaneVote
from ft_hsdp.ftar.frame import Entry
from ft_hsdp.train.device import Summarize, aside, on_host, told
from ft_hsdp.train.lanes import LanePart, LanePlan
from ft_hsdp.train.optimizer.clipping import square_sum

SURE_NORM = 1e18  # its square is far below what fp32 can hold


Numbers = tuple[list[str], list[float]]
"""Of a sum: the checksums of its pieces, and the sums of squares of what counts in the norm."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What a vote says of the sum of a lane's part of a bucket."""

    bucket: int
    lane: int  # place in the plan
    entries: Sequence[Entry]  # of each member
    numbers: Callable[[], Numbers]


def look(part: LanePart, pieces: Sequence[torch.Tensor], summarize: Summarize | None) -> Callable[[], Numbers]:
    """Begin to compute what a vote says of a sum, and return what waits for it (`Looked.numbers`).

    Args:
        pieces: Of the sum, complete.
        summarize: What looks at a sum on a device; None: the host does, before this returns. A gradient that is
            cut is summed in host memory, whatever the device is.
    """
    if summarize is None or not part.uncut:
        shards = [on_host(piece) for piece in pieces]
        spans = (shard[a:b] for shard, of in zip(shards, part.counted, strict=False) for a, b in of)
        numbers = [checksum(shard) for shard in shards], [float(square_sum(span)) for span in spans]
        return lambda: numbers
    with aside(pieces[0].device):
        waits = summarize(pieces[0], part.counted[0])

    def fetched() -> Numbers:
        digest, squares = waits()
        return [digest], squares

    return fetched


def lane_votes(plan: LanePlan, looked: Iterable[Looked], state_digests: Sequence[str]) -> tuple[LaneVote, ...]:
    """Return what a rank votes on each of its lanes: all that counts is the same at the lane's members.

    Args:
        looked: At all works of the attempt.
        state_digests: Of each lane, of what it has of the base state; (): it is not held.
    """
    found = sorted(looked, key=lambda each: each.bucket)
    votes: list[LaneVote] = []
    for place, lane in enumerate(plan.lanes):
        mine = [each for each in found if each.lane == place]
        digest, square = judged(each.numbers() for each in mine)
        said = contributions([each.entries for each in mine])
        state_digest = state_digests[place] if state_digests else ""
        votes.append(LaneVote(lane.ring.number, lane.ring.owners, digest, square, said, state_digest))
    return tuple(votes)


def judged(numbers: Iterable[Numbers]) -> tuple[str, float]:
    """Return the digest of a lane's sums, and the sum of squares of what counts in the norm, bucket by bucket."""
    found = list(numbers)
    digest = state_id.digest([each for checksums, _ in found for each in checksums])
    return digest, float(sum(square for _, squares in found for square in squares))


def contributions(said_by: Sequence[Sequence[Entry]]) -> tuple[Contribution, ...]:
    """Return who put what into the sums; () if the buckets disagree, so that the vote cannot pass."""
    said = [[c for e in sorted(entries, key=lambda e: e.replica) for c in e.contributions] for entries in said_by]
    alike = {tuple(replace(c, loss=0.0) for c in each) for each in said}
    return tuple(said[-1]) if len(alike) == 1 else ()


def square_of(flat: torch.Tensor) -> Callable[[], float]:
    """Return what returns the sum of squares of a gradient: an optimizer keeps them in fp32, so they must fit.

    It does not block. What it returns is to be called when the gradient is complete (`device.told`). On a CPU a
    norm in fp32 is enough far below the limit; near it, fp64 decides.
    """
    if flat.is_cuda:
        exact = told(torch.linalg.vector_norm(flat, dtype=torch.float64))
        return lambda: float(exact) ** 2
    norm = torch.linalg.vector_norm(flat)
    return lambda: float(norm) ** 2 if float(norm) < SURE_NORM else float(square_sum(flat))


def squares(plan: LanePlan, looked: Iterable[Looked], poisoned: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Return the sum of squares of each replica's part of this rank's gradient; () if that is cut into lanes.

    What is no gradient does not count, and who is ``poisoned`` has none.
    """
    found: dict[int, list[float]] = defaultdict(list)
    for each in looked:
        if not plan.cut and any(plan.lanes[each.lane].parts[each.bucket].counted):
            for entry in each.entries:
                found[entry.replica].append(entry.square)
    return tuple((r, math.fsum(found[r])) for r in sorted(found) if r not in poisoned)  # in any order of buckets


def checksum(tensor: torch.Tensor) -> str:
    array: Any = tensor.numpy()
    return xxhash.xxh3_128_hexdigest(memoryview(array).cast("B"))
