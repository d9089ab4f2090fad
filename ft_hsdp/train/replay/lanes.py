"""The sums of a replay: added again in the order in which the job's rings have added them.

Replicas of unequal width sum in lanes (`train.lanes`). The ranks of one number cannot repeat all of them, so there
are as many ranks for each width, and they train what replicas of that width have trained. `SharedLanes` brings
their gradients together: what a rank has trained of a lane it writes into a file, and the owners of the lane in
the other widths read it. All of them add alike, so they hold the same sums, each cut for its own width.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.ring import RingPlan, fold_order
from ft_hsdp.errors import Retryable
from ft_hsdp.ftar.pieces import PiecedTensor, pieced
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.train.device import Summarize
from ft_hsdp.train.gradients import Feeding, Traffic
from ft_hsdp.train.lanes import GradientLanes, LanePart, OwnLane
from ft_hsdp.train.votes import judged, look

LOOK_S = 0.005  # between two looks for a file

PartVote = tuple[int, str, float]
"""Of a lane: its number, the digest of its sums, and the sum of their squares."""


def ring_sum(
    of_replicas: Mapping[int, Tensor], ring: Sequence[int], settings: Settings, wire: torch.dtype | None = None
) -> Tensor:
    """Return the sum over replicas in the order in which a ring adds, shard by shard in each partition.

    Args:
        wire: type in which values travelled, to which each member has rounded; None: their own.
    """
    contributors = frozenset(of_replicas)
    given = next(iter(of_replicas.values()))
    sums = torch.empty_like(given, dtype=wire)
    plan = RingPlan.cut(sums.numel(), sums.element_size(), len(ring), settings.slots, settings.chunk_bytes)
    for shard in range(len(ring)):
        first, *others = fold_order(shard, ring, contributors)
        for span in plan.shard_spans(shard):
            piece = sums[span.start : span.stop]
            piece.copy_(of_replicas[first][span.start : span.stop])
            for replica in others:
                torch.add(piece, of_replicas[replica][span.start : span.stop], out=piece)
    return sums.to(given.dtype)


def gathered(part: LanePart, flat: Tensor) -> Tensor:
    """Return what a rank adds to a part of a lane."""
    memory = PiecedTensor([torch.empty(group.size) for group in part.groups])
    pieces = pieced(part.gather(flat, memory)).pieces
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def sum_part(
    part: LanePart,
    theirs: Mapping[int, Tensor],
    out: Tensor,
    ring: Sequence[int],
    settings: Settings,
    wire: torch.dtype | None = None,
) -> list[Tensor]:
    """Add a part of a lane up, and put the sum where it belongs in the rank's bucket.

    Args:
        out: The rank's bucket of sums, fp32 [numel]; zero, as far as the part is `whole`.
    """
    added = ring_sum(theirs, ring, settings, wire) if part.size else torch.empty(0)
    target = part.target(out, lambda _, numel: torch.empty(numel))
    pieces = pieced(target).pieces
    for piece, sums in zip(pieces, added.split([p.numel() for p in pieces]), strict=True):
        piece.copy_(sums)
    part.scatter(target, out)
    return list(pieces)


@dataclass(eq=False)
class LocalGradients:
    """Stands in for the `Reducer`: it keeps what the loop has trained for one contributor."""

    _buckets: int
    _kept: dict[int, tuple[Tensor, tuple[Contribution, ...]]] = field(default_factory=dict)
    _loss: Callable[[], float] = lambda: 0.0
    traffic: Traffic = field(default_factory=Traffic)

    def open(self, feeding: Feeding | None) -> None:
        self._kept.clear()

    def ready(
        self, bucket: int, flat: Tensor, contributions: tuple[Contribution, ...], loss: Callable[[], float]
    ) -> None:
        before = self._kept.get(bucket)
        self._kept[bucket] = (flat if before is None else before[0] + flat, contributions)
        self._loss = loss

    def take(self) -> tuple[list[Tensor], tuple[Contribution, ...]]:
        """Return the gradients of all buckets, and what is in them, with the mean loss."""
        kept = [self._kept[bucket] for bucket in range(self._buckets)]
        loss = self._loss()
        return [flat for flat, _ in kept], tuple(replace(c, loss=loss) for c in kept[-1][1])

    def give_back(self, out: list[Tensor]) -> None:
        """Do nothing: the sums are not used again."""


@dataclass(eq=False)
class SharedLanes:
    """The sums of one rank of a replay, with those that repeat replicas of another width, if there are any."""

    _lanes: GradientLanes  # of the rank's gradient
    _widths: Sequence[int]  # for which there are ranks
    _width: int  # of this rank's replica
    _rank: int  # this one
    _folder: Path  # where the files are; for all ranks of the replay, and for nobody else
    _settings: Settings  # of the job's rings
    _wait_s: float  # the longest wait for ranks of another width
    _summarize: Summarize | None = None  # looks at sums on the device, as the job's ranks did
    _wires: Sequence[torch.dtype | None] = ()  # of each bucket, from `train.lanes.wires`; (): all as they are
    _written: list[Path] = field(default_factory=list)  # by this rank, and perhaps not read by all others yet

    def give(self, record: CommitRecord, trained: Mapping[int, Sequence[Tensor]]) -> None:
        """Write what this rank has trained for those that own the same rows in another width. Does not wait."""
        for lane in self._lanes.plan(record.ring_widths).lanes if record.ring_widths else ():
            for replica, flats in trained.items():
                parts = [gathered(part, flat) for part, flat in zip(lane.parts, flats, strict=True)]
                self._write(_name(record.step, replica, lane.ring.number), torch.cat(parts).numpy().tobytes())

    def sums(
        self, record: CommitRecord, trained: Mapping[int, Sequence[Tensor]]
    ) -> tuple[list[Tensor], list[PartVote]]:
        """Return the sums of a step, and what is voted on each lane of this rank. Blocks until all have given.

        Args:
            trained: What was given; with members of equal width, of all contributors.

        Returns:
            A flat fp32 shard for each bucket, and the votes by ascending number of the lane.

        Raises:
            Retryable: The ranks of another width have given nothing in time.
        """
        plan = self._lanes.plan(record.ring_widths)
        device = next((flats[0].device for flats in trained.values()), torch.device("cpu"))
        out = [torch.zeros(size, device=device) for size in self._lanes.sizes]
        votes: list[PartVote] = []
        for place, lane in enumerate(plan.lanes):
            theirs = self._given(record, lane) if plan.cut else trained
            found: list[tuple[list[str], list[float]]] = []
            for bucket, flat in enumerate(out):
                for part in (part for at, _, part in plan.of(bucket) if at == place):
                    given = {replica: parts[bucket] for replica, parts in theirs.items()}
                    wire = self._wires[bucket] if self._wires else None
                    sums = sum_part(part, given, flat, record.ring, self._settings, wire)
                    found.append(look(part, sums, self._summarize)())
            votes.append((lane.ring.number, *judged(found)))
        return out, votes

    def _given(self, record: CommitRecord, lane: OwnLane) -> dict[int, Sequence[Tensor]]:
        sizes = [part.size for part in lane.parts]
        found: dict[int, Sequence[Tensor]] = {}
        for replica in record.contributors:
            data = bytearray(self._read(_name(record.step, replica, lane.ring.number)))
            found[replica] = torch.frombuffer(data, dtype=torch.float32).split(sizes)
        return found

    def told(self, record: CommitRecord, mine: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Tell the ranks of other widths what was trained, and return what all have trained. Blocks for theirs.

        To be called when all ranks of this width have their sums of the step.

        Args:
            mine: The contributions that ranks of this width repeat, as JSON values; rank 0 writes them.

        Returns:
            Those of all widths; with members of equal width they are ``mine``.

        Raises:
            Retryable: The ranks of another width have told nothing in time.
        """
        if not record.ring_widths:
            return mine
        before, self._written = self._written, []
        if self._rank == 0:
            self._write(f"{record.step}-width-{self._width}", json.dumps(mine).encode())
        found = [json.loads(self._read(f"{record.step}-width-{width}")) for width in self._widths]
        for path in before:  # all others have their sums of the step, so nobody reads these any more
            path.unlink()
        return [each for of_width in found for each in of_width]

    def _write(self, name: str, data: bytes) -> None:
        """Write a file that is there as a whole or not at all."""
        path = self._folder / name
        part = path.with_suffix(f".{self._width}")
        part.write_bytes(data)
        part.replace(path)
        self._written.append(path)

    def _read(self, name: str) -> bytes:
        path, until = self._folder / name, time.monotonic() + self._wait_s
        while True:
            try:
                return path.read_bytes()
            except FileNotFoundError:
                if time.monotonic() > until:
                    text = f"the ranks of another width have not repeated step {name.partition('-')[0]}"
                    raise Retryable(f"{text} within {self._wait_s:g} s") from None
            time.sleep(LOOK_S)


def _name(step: int, replica: int, lane: int) -> str:
    return f"{step}-replica-{replica}-lane-{lane}"
