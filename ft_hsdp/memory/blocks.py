"""Static data in blocks: which hosts hold which blocks, and who reads which from whom (ReStore §IV and §V).

The blocks are numbered from 0. Ranges of them are permuted, so that what one rank has worked on is spread over all
hosts when it has to be loaded again (§IV-B). The permuted ranges are cut into equal shares, one for each host of
the first submission, and each share into slices. All blocks of a slice have the same holders: L(x, k) for k below
the number of copies, and where a holder is lost the next hosts of the probing sequence (§IV-E). So a slice is what
a host stores, and what is copied from host to host. The slices of a share have the same holders until one is lost.

The permutation deals out the ranges in turns: each turn gives one range to each share, in an order of its own. Any
part of the data is then spread evenly, which it would not be by a permutation that is drawn from all.

Positions, slices and holders are functions of their numbers: nobody keeps a table, and all ranks compute the same.
Blocks are counted, never bytes. A span is (first block, block after the last one).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ft_hsdp.core.randomness import Permutation
from ft_hsdp.memory import placement
from ft_hsdp.memory.placement import first_holders, probing

Span = tuple[int, int]


@lru_cache(maxsize=4096)
def _order(shares: int, seed: int, turn: int) -> Permutation:
    return Permutation(shares, seed, turn)


@dataclass(frozen=True, slots=True)
class SliceRun:
    """Consecutive blocks that lie one after the other in a slice."""

    slice: int
    offset: int  # in the slice, in blocks
    block: int  # the first one
    count: int

    @property
    def span(self) -> Span:
        return self.block, self.block + self.count


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where each block lies. Blocks of a range keep their order; the last range may be short."""

    blocks: int  # n
    range_blocks: int  # s_pr, the blocks of a permutation range
    slices: int
    seed: int | None = 0  # of the permutation; None: ranges keep their order
    parts: int = 1  # slices of a share: there are slices / parts shares, p hosts of the first submission

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: One of them is below 1, or the slices are no whole shares.
        """
        if min(self.blocks, self.range_blocks, self.slices, self.parts) < 1 or self.slices % self.parts:
            cut = f"{self.slices} slices, {self.parts} of a share"
            raise ValueError(f"{self.blocks} blocks in ranges of {self.range_blocks}, {cut}")

    @property
    def ranges(self) -> int:
        return -(-self.blocks // self.range_blocks)

    def position(self, number: int) -> int:
        if self.seed is None:
            return number
        turn, place = divmod(number, self._shares)
        return self._share(self._dealt(turn, self.seed)[place]).start + turn

    def range_at(self, position: int) -> int:
        if self.seed is None:
            return position
        at = position * self._shares // self.ranges
        turn = position - self._share(at).start
        return turn * self._shares + self._dealt(turn, self.seed).index(at)

    @property
    def _shares(self) -> int:
        return self.slices // self.parts

    def _share(self, number: int) -> range:
        """Return the places in the permuted order that are in a share: those of its slices."""
        return range(-(-number * self.ranges // self._shares), -(-(number + 1) * self.ranges // self._shares))

    def _dealt(self, turn: int, seed: int) -> Permutation | list[int]:
        """Return the share of each range of a turn, in order; in the last turn only large shares get one."""
        order = _order(self._shares, seed, turn)
        if (turn + 1) * self._shares <= self.ranges:
            return order
        return [number for number in order if turn < len(self._share(number))]

    def positions(self, number: int) -> range:
        """Return the places in the permuted order that are in a slice: where floor(place * p / ranges) is it."""
        return range(-(-number * self.ranges // self.slices), -(-(number + 1) * self.ranges // self.slices))

    def slice_blocks(self, number: int) -> int:
        """Return the blocks for which a slice has room; a short range takes the room of a whole one."""
        return len(self.positions(number)) * self.range_blocks

    def count(self, number: int) -> int:
        short = self.ranges * self.range_blocks - self.blocks  # what the last range lacks
        return self.slice_blocks(number) - short * (self.position(self.ranges - 1) in self.positions(number))

    def contents(self, number: int) -> Iterator[SliceRun]:
        """Yield what is in a slice, range by range, in the order in which it lies there."""
        for place, position in enumerate(self.positions(number)):
            first = self.range_at(position) * self.range_blocks
            yield SliceRun(number, place * self.range_blocks, first, min(self.range_blocks, self.blocks - first))

    def runs(self, spans: Iterable[Span]) -> Iterator[SliceRun]:
        """Yield where the blocks of ``spans`` lie; runs that follow each other, and in the slice too, are one.

        Raises:
            ValueError: A span is not inside the data.
        """
        last: SliceRun | None = None
        for first, end in spans:
            if not 0 <= first <= end <= self.blocks:
                raise ValueError(f"blocks {first} to {end} of {self.blocks}")
            while first < end:
                number, inside = divmod(first, self.range_blocks)
                position = self.position(number)
                at = position * self.slices // self.ranges
                offset = (position - self.positions(at).start) * self.range_blocks + inside
                count = min(self.range_blocks - inside, end - first)
                follows = last is not None and (last.slice, last.offset + last.count, last.block + last.count) == (
                    at,
                    offset,
                    first,
                )
                if last is not None and follows:
                    last = SliceRun(at, last.offset, last.block, last.count + count)
                else:
                    if last is not None:
                        yield last
                    last = SliceRun(at, offset, first, count)
                first += count
        if last is not None:
            yield last


# Who holds what.


def first_hosts(number: int, slices: int, hosts: int, copies: int) -> tuple[int, ...]:
    """Return the holders of a slice when no host is lost.

    They are ReStore's L(x, k) if `copies` divides `hosts`. Otherwise that formula makes nearly each host a set
    of holders of its own, so GEMINI's groups are used instead.

    Args:
        copies: r, at most `hosts`.
    """
    if hosts % copies == 0:
        return first_holders(number, slices, hosts, copies)
    owner = number * hosts // slices
    groups, _ = placement.place(hosts, copies)
    group = next(each for each in groups if owner in each)
    return (owner, *placement.holders(group, owner, copies))


@dataclass(frozen=True, slots=True)
class SliceCopy:
    slice: int
    host: int
    sources: tuple[int, ...]  # hosts that have it, the first one is to be asked first


@dataclass(frozen=True, slots=True)
class SubmissionPlan:
    """What is done so that each slice is on enough hosts."""

    written: tuple[tuple[int, int], ...]  # (slice, host): nobody has it, so the host reads it from the source
    copied: tuple[SliceCopy, ...]
    dropped: tuple[tuple[int, int], ...]  # (slice, host): more than enough hosts have it
    short: tuple[int, ...]  # slices that fewer hosts will have than are wanted


def plan_submission(
    slices: int,
    hosts: int,
    copies: int,
    held: Mapping[int, Collection[int]],
    refused: Collection[tuple[int, int]] = (),
) -> SubmissionPlan:
    """Decide who gets which slice; what is held where it belongs does not move.

    After a loss the next hosts of the probing sequence take the place of those that are lost (§IV-E). It is the
    same decision for the first submission, when nobody holds anything.

    Args:
        hosts: number of hosts that there are, numbered from 0.
        copies: how many of them each slice is to be on; more than `hosts` means all.
        held: the hosts that have a slice, by slice.
        refused: (slice, host) pairs for which the host has no room.
    """
    wanted = min(copies, hosts)
    written, copied, dropped, short = [], [], [], []
    sent: dict[int, int] = defaultdict(int)
    for number in range(slices):
        having = frozenset(held.get(number, ()))
        sequence = list(probing(number, hosts, first_hosts(number, slices, hosts, wanted)))
        keep = [host for host in sequence if host in having][:wanted]
        able = [host for host in sequence if host not in having and (number, host) not in refused]
        more = able[: wanted - len(keep)]
        dropped += [(number, host) for host in sorted(having) if host not in keep]
        if len(keep) + len(more) < wanted:
            short.append(number)
        if not having and more:
            keep = more[:1]
            written.append((number, more.pop(0)))
        for host in more:
            sources = sorted(keep, key=lambda each: (sent[each], each))
            sent[sources[0]] += 1
            copied.append(SliceCopy(number, host, tuple(sources)))
    return SubmissionPlan(tuple(written), tuple(copied), tuple(dropped), tuple(short))


# Who reads what from whom.


@dataclass(frozen=True, slots=True)
class BlockRead:
    reader: int
    holder: int
    run: SliceRun


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Which rank reads which blocks from which host."""

    reads: tuple[BlockRead, ...]
    missing: tuple[tuple[int, Span], ...]  # (reader, blocks): no host has them


def plan_load(
    layout: BlockLayout,
    requests: Mapping[int, Sequence[Span]],
    holders: Mapping[int, Sequence[int]],
    near: Mapping[int, int] | None = None,
) -> LoadPlan:
    """Decide who reads what from whom: each rank from its own host if it can, and all hosts send about the same.

    With the requests of all ranks (ReStore's first mode, §V) the whole load is balanced. With those of one rank,
    its own (the second mode), no rank has to know what the others want: then ties are decided by a hash of the
    rank, so that different ranks begin with different hosts. Consecutive blocks with the same holders come from
    one host.

    Args:
        requests: the blocks that each rank wants.
        holders: the hosts that have a slice, by slice.
        near: the host of each rank; None: all ranks are elsewhere.
    """
    near = near or {}
    wanted = [
        (reader, run) for reader, spans in sorted(requests.items()) for run in _together(layout, spans, holders)
    ]
    reads: list[BlockRead] = []
    missing: list[tuple[int, Span]] = []
    loads: dict[int, int] = defaultdict(int)
    talks: set[tuple[int, int]] = set()
    # Large runs first: the small ones even out what the large ones leave uneven.
    for reader, runs in sorted(wanted, key=lambda each: (-_count(each[1]), each[0], each[1][0].block)):
        able = holders.get(runs[0].slice, ())
        if not able:
            missing += [(reader, run.span) for run in runs]
            continue
        if near.get(reader) in able:
            holder = near[reader]
        else:
            holder = min(
                able, key=lambda host: (loads[host], (reader, host) not in talks, placement.mixed(reader, host))
            )
            loads[holder] += _count(runs)
            talks.add((reader, holder))
        reads += [BlockRead(reader, holder, run) for run in runs]
    reads.sort(key=lambda read: (read.reader, read.run.block))
    return LoadPlan(tuple(reads), tuple(sorted(missing)))


def _together(
    layout: BlockLayout, spans: Sequence[Span], holders: Mapping[int, Sequence[int]]
) -> Iterator[list[SliceRun]]:
    """Yield runs of consecutive blocks with the same holders, which one host serves."""
    group: list[SliceRun] = []
    for run in layout.runs(spans):
        if group:
            last = group[-1]
            same = set(holders.get(last.slice, ())) == set(holders.get(run.slice, ()))
            if not same or last.block + last.count != run.block:
                yield group
                group = []
        group.append(run)
    if group:
        yield group


def _count(runs: Sequence[SliceRun]) -> int:
    return sum(run.count for run in runs)


# Who works on what.


def share(blocks: int, ranks: int, align: int = 1) -> list[Span]:
    """Return equal parts of the data, one for each rank, in order.

    Args:
        align: each part but the last begins and ends at a multiple of so many blocks.
    """
    units = -(-blocks // align)
    return [
        (min(blocks, units * rank // ranks * align), min(blocks, units * (rank + 1) // ranks * align))
        for rank in range(ranks)
    ]


def runs_in_words(numbers: Iterable[int]) -> list[str]:
    """Return numbers in words, in order, with those that follow each other as one: 0-3, 7."""
    runs = merged((number, number + 1) for number in numbers)
    return [f"{first}" if end - first == 1 else f"{first}-{end - 1}" for first, end in runs]


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the spans in order, without empty ones; those that touch or overlap are one."""
    found: list[Span] = []
    for first, end in sorted(spans):
        if first >= end:
            continue
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return tuple(found)
