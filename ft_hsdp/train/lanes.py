"""How the gradient of a rank is divided into lanes, in any membership (`memory.lanes`).

Each bucket of a rank is one flat tensor: its rows of the bucket's parameters, one parameter after another, each
padded to the rows of a full rank. With replicas of equal width a rank has one lane, which is each bucket as it is,
summed where it lies, on any device (`one_lane`).

With replicas of unequal width a rank has several. A lane's part of a bucket is what it has of these rows, without
padding: a run of rows for each parameter. Large runs are summed where they lie. Small neighbours are gathered into
a buffer, and the sum is scattered: otherwise each of them would be a chunk of its own (`core.ring`).

FSDP2 gives the mean over the data ranks of a replica, so what narrower replicas bring is multiplied by their share
of the largest width. So the sum over the replicas is the sum over all ranks, divided by the largest width.

`check_fewer_ranks` refuses models that cannot be held, or summed, like that; `check_update` refuses optimizers
that update to other bits in replicas of other widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch.distributed.tensor import Shard

from ft_hsdp.config import Config
from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Grant
from ft_hsdp.errors import ConfigError
from ft_hsdp.ftar.connections import LaneRing
from ft_hsdp.ftar.pieces import PiecedTensor, Values, pieced
from ft_hsdp.memory.lanes import RowLane, lanes, without_rows
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel
from ft_hsdp.train.optimizer.creation import updates_rows_alone

Empty = Callable[[int, int], torch.Tensor]
"""Returns memory for a group of rows of a part: (number of the group, fp32 elements)."""

Spans = tuple[tuple[int, int], ...]
"""(begin, end) of elements of a flat tensor, in order."""

LARGE = (512 << 10) // 4
"""Rows of a parameter with at least so many elements are summed where they lie: one more chunk costs less than
copies; docs/measurements.md has the figures."""


@dataclass(frozen=True, slots=True)
class LaneRun:
    """Neighbouring elements of a rank's flat bucket that are in one lane."""

    flat: int  # where they begin in the bucket
    group: int  # where they begin in their group
    size: int


@dataclass(frozen=True, slots=True)
class LaneGroup:
    """Runs of rows that lie together while they are summed."""

    size: int  # elements; the same in all members of the lane
    runs: tuple[LaneRun, ...]  # in order; fewer elements than `size`: the rest is zero here


@dataclass(frozen=True, slots=True)
class LanePart:
    groups: tuple[LaneGroup, ...]  # at least one
    counted: tuple[Spans, ...]  # of each group, what counts in the norm
    scale: float = 1.0  # by which the gradient is multiplied
    whole: bool = False  # not a gradient: the sum of all lanes is the bucket's
    uncut: bool = False  # the bucket as it is, on any device: the rank has no other lane

    @property
    def size(self) -> int:
        return sum(group.size for group in self.groups)

    def target(self, out: torch.Tensor, empty: Empty) -> Values:
        """Return where the sum of the part is to be written to."""
        if self.uncut:
            return out
        return PiecedTensor(
            [
                _run(out, group.runs[0]) if self._in_place(group, out) else empty(number, group.size)
                for number, group in enumerate(self.groups)
            ]
        )

    def gather(self, flat: torch.Tensor, target: Values) -> Values:
        """Return what this rank adds to the sum.

        Args:
            flat: The rank's gradient of the bucket, fp32 [numel]; in host memory, unless the part is uncut.

        Returns:
            fp32 [size]: of each group a part of ``flat``, or the piece of ``target`` if it has to be copied.
        """
        if self.uncut:
            return flat
        pieces = []
        for group, piece in zip(self.groups, pieced(target).pieces, strict=True):
            if self.scale == 1.0 and self._in_place(group, flat):
                pieces.append(_run(flat, group.runs[0]))
                continue
            if sum(run.size for run in group.runs) < group.size:
                piece.zero_()
            for run in group.runs:
                torch.mul(_run(flat, run), self.scale, out=piece[run.group : run.group + run.size])
            pieces.append(piece)
        return PiecedTensor(pieces)

    def scatter(self, summed: Values, out: torch.Tensor) -> None:
        """Copy the sum of the part to where it belongs in the bucket, unless it is there already."""
        if self.uncut:
            return
        for group, piece in zip(self.groups, pieced(summed).pieces, strict=True):
            if self.whole:
                out.add_(piece.to(out.device))
            elif not self._in_place(group, out):
                for run in group.runs:
                    _run(out, run).copy_(piece[run.group : run.group + run.size])

    def _in_place(self, group: LaneGroup, flat: torch.Tensor) -> bool:
        return not self.whole and len(group.runs) == 1 and not flat.is_cuda


def _run(flat: torch.Tensor, run: LaneRun) -> torch.Tensor:
    return flat[run.flat : run.flat + run.size]


@dataclass(frozen=True, slots=True)
class OwnLane:
    ring: LaneRing
    owners: tuple[int, ...]  # the rank that has it in a replica of each width, the largest width first; (): any
    parts: tuple[LanePart, ...]  # of each bucket


@dataclass(frozen=True, slots=True)
class LanePlan:
    """The lanes of this rank in memberships of certain widths."""

    widths: tuple[int, ...]  # the different ones, the largest first; (): they are equal
    lanes: tuple[OwnLane, ...]  # by ascending number
    buckets: int

    def of(self, bucket: int) -> list[tuple[int, OwnLane, LanePart]]:
        """Return what is summed of a bucket: (place in `lanes`, lane, its part).

        An empty part of several is left out, but not of the last bucket: its headers tell all members of each lane
        the loss.
        """
        found = [(place, lane, lane.parts[bucket]) for place, lane in enumerate(self.lanes)]
        return [each for each in found if each[2].uncut or each[2].size or bucket == self.buckets - 1]

    @property
    def cut(self) -> bool:
        """Whether the gradient is cut, and gathered in host memory."""
        return bool(self.widths)

    @property
    def works(self) -> int:
        return sum(len(self.of(bucket)) for bucket in range(self.buckets))

    def scatter(self, sums: Sequence[tuple[int, int, Values]], out: Sequence[torch.Tensor]) -> None:
        """Put all sums, of (bucket, place of the lane, values), where they belong."""
        for bucket, flat in enumerate(out):
            if all(lane.parts[bucket].whole for lane in self.lanes):
                flat.zero_()
        for bucket, place, values in sums:
            self.lanes[place].parts[bucket].scatter(values, out[bucket])


def one_lane(ring: LaneRing, sizes: Sequence[int], counted: Sequence[Spans] | None = None) -> LanePlan:
    """Return the only lane of a rank, with replicas of equal width: each bucket as it is.

    Args:
        counted: Of each bucket that is a gradient, the first ones: what counts in the norm; None: all.
    """
    spans = [((0, size),) for size in sizes] if counted is None else [*counted, *[()] * len(sizes)]
    parts = [
        LanePart((LaneGroup(size, (LaneRun(0, 0, size),)),), (of_bucket,), uncut=True)
        for size, of_bucket in zip(sizes, spans, strict=False)
    ]
    return LanePlan((), (OwnLane(ring, (), tuple(parts)),), len(parts))


@dataclass(eq=False)
class GradientLanes:
    """The lanes of a rank's gradient in any membership."""

    # Of each bucket with gradients, the parameters in order: (name, whole shape). In those that follow each rank
    # has a value of its own. None: the gradient is never cut.
    _buckets: Sequence[Sequence[tuple[str, tuple[int, ...]]]] | None
    _usual: LanePlan  # the lane of the rank in replicas of equal width, from `one_lane`
    _width: int
    _rank: int
    _sizes: object = None  # what else must be the same in all members, such as the sizes of chunks
    _plans: dict[tuple[int, ...], LanePlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = tuple(part.size for part in self._usual.lanes[0].parts)
        self._gradients = tuple(tuple(bucket) for bucket in self._buckets or ())
        self._whole = self.sizes[len(self._gradients) :]

    @cached_property
    def _layout(self) -> str:
        return state_id.digest(
            [[list(each) for each in bucket] for bucket in self._gradients], self._whole, self._sizes
        )

    def of(self, grant: Grant) -> tuple[LaneRing, ...]:
        """Return the rings of this rank in a membership, by ascending number of the lane. Any thread."""
        return tuple(lane.ring for lane in self.plan(grant.widths).lanes)

    def plan(self, widths: Iterable[int]) -> LanePlan:
        different = tuple(sorted(set(widths), reverse=True))
        if self._buckets is None or self._width not in different:
            return self._usual
        if different not in self._plans:
            self._plans[different] = self._divide(different)
        return self._plans[different]

    def _divide(self, widths: tuple[int, ...]) -> LanePlan:
        tensors = {f"{b}.{name}": (shape, 4) for b, bucket in enumerate(self._gradients) for name, shape in bucket}
        mine = [
            (number, lane)
            for number, lane in enumerate(lanes(tensors, widths))
            if lane.owner(self._width) == self._rank
        ]
        own = tuple(self._own(number, lane, first=place == 0) for place, (number, lane) in enumerate(mine))
        return LanePlan(widths, own, len(self._gradients) + len(self._whole))

    def _own(self, number: int, lane: RowLane, first: bool) -> OwnLane:
        owners = tuple(zip(lane.widths, lane.owners, strict=True))
        layout = state_id.digest(self._layout, number, owners)
        parts = [self._part(b, lane) for b in range(len(self._gradients))]
        for size in self._whole:
            runs = (LaneRun(0, 0, size),) if first else ()  # the other lanes of the rank add zeros
            parts.append(LanePart((LaneGroup(size, runs),), ((),), whole=True))
        return OwnLane(LaneRing(number, layout, owners), lane.owners, tuple(parts))

    def _part(self, index: int, lane: RowLane) -> LanePart:
        """Return what ``lane`` has of a bucket, in groups that are the same in all members of the lane."""
        rows = {r.tensor: r for r in lane.rows}
        groups: list[list[LaneRun]] = []
        place, large = 0, True  # whether the newest rows are
        for name, shape in self._gradients[index]:
            chunk, row = -(-shape[0] // self._width), prod(shape[1:])
            if (r := rows.get(f"{index}.{name}")) is not None:
                begin = place + (r.start - self._rank * chunk) * row
                if large or r.elements >= LARGE:
                    groups.append([])
                large = r.elements >= LARGE
                _append(groups[-1], begin, r.elements)
            place += chunk * row
        found = tuple(LaneGroup(sum(run.size for run in runs), tuple(runs)) for runs in groups or [[]])
        counted: tuple[Spans, ...] = tuple(((0, group.size),) for group in found)
        return LanePart(found, counted, self._width / lane.widths[0])


def _append(runs: list[LaneRun], begin: int, size: int) -> None:
    """Add elements of the bucket to the end of a group; if they are neighbours in it, they are one run."""
    last = runs[-1] if runs else LaneRun(begin, 0, 0)
    end = last.group + last.size
    if runs and last.flat + last.size == begin:
        runs[-1] = LaneRun(last.flat, last.group, last.size + size)
    else:
        runs.append(LaneRun(begin, end, size))


def wires(config: Config, model: AdoptedModel) -> tuple[torch.dtype | None, ...]:
    """Return the type in which each bucket of sums travels; None: as it is, also what is no gradient."""
    narrow = torch.bfloat16 if config.ftar.dtype == "bfloat16" else None
    return tuple(narrow if bucket < model.gradients else None for bucket in range(len(model.sizes)))


def check_fewer_ranks(config: Config, model: AdoptedModel, ranks: int) -> None:
    """Check that fewer ranks can hold a model, if a replica of the job may go on with fewer.

    With several replicas, those of other widths sum their gradients in lanes. Each rank then needs a row. Does not
    block.

    Raises:
        ConfigError: A parameter is cut in another way than along dimension 0 over all ranks; or there are several
            replicas, and the model has buffers that move, or some ranks of a width would have no row.
    """
    least = config.memory.shrink_to
    if least is None:
        return
    for name, param in model.params.items():
        cut = tuple(getattr(param, "placements", ()))
        if cut != (Shard(0),) or param.device_mesh.size() != ranks:
            how = ", ".join(map(str, cut)) or "not at all"
            allowed = f"null, unless each parameter is cut along dimension 0 over all ranks ({name} is cut: {how})"
            raise ConfigError("memory.shrink_to", least, allowed)
    if config.slots < 2:
        return
    if (rows := model.rows) is None:
        allowed = "null with batch_norm or declared buffers: what moves them depends on the number of ranks"
        raise ConfigError("memory.shrink_to", least, allowed)
    tensors = {name: (shape, 4) for bucket in rows for name, shape in bucket}
    of_host = config.ranks_per_replica // (config.hosts.per_replica or 1)
    for width in (w for w in range(of_host, config.ranks_per_replica + 1, of_host) if w >= least):
        if empty := without_rows(tensors, width):
            allowed = f"null, or a model of which each rank has a row (rank {empty[0]} of {width} would have none)"
            raise ConfigError("memory.shrink_to", least, allowed)


def check_update(config: Config, optimizer: torch.optim.Optimizer) -> None:
    """Check that replicas of unequal width update to the same bits, if the job may have such. Does not block."""
    least = config.memory.shrink_to
    if least is not None and config.slots > 1 and not updates_rows_alone(optimizer):
        allowed = f"null: an update by {type(optimizer).__name__} has other bits on another number of ranks"
        raise ConfigError("memory.shrink_to", least, allowed)
