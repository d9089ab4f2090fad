"""Partition: how a message is cut into partitions, those into a shard for each member, a shard into chunks.

The plan is a pure function of sizes that every member knows, so a peer never tells us a size. Rounds count the
chunks of a shard through all partitions and never start again: a partition does not drain the pipe (FT-HSDP §4.2
starts each partition on an empty one).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a flat buffer."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def shards(elements: int, members: int) -> tuple[Span, ...]:
    """Cut ``elements`` into one span for each of ``members``; sizes differ by at most one element.

    Raises:
        ValueError: no members, or a negative size.
    """
    if members < 1 or elements < 0:
        raise ValueError(f"cannot cut {elements} elements for {members} members")
    base, extra = divmod(elements, members)
    edges = [0]
    for i in range(members):
        edges.append(edges[-1] + base + (i < extra))
    return tuple(Span(a, b) for a, b in itertools.pairwise(edges))


@dataclass(frozen=True, slots=True)
class Plan:
    """How ``elements`` go round a ring of ``members`` in chunks of at most ``chunk`` elements.

    ``slots`` of them are on their way to a neighbour at once, so partitions have at most chunk x slots x members
    elements (FT-HSDP §4.2).
    """

    elements: int
    members: int
    chunk: int
    slots: int

    def __post_init__(self) -> None:
        if self.elements < 0 or self.members < 1 or self.chunk < 1 or self.slots < 1:
            raise ValueError(f"no such plan: {self}")

    @property
    def partition(self) -> int:
        """Elements of a full partition."""
        return self.chunk * self.slots * self.members

    @property
    def partitions(self) -> int:
        """Number of partitions; an empty message is one empty partition, for its frames carry the headers."""
        return max(1, -(-self.elements // self.partition))

    @property
    def rounds(self) -> int:
        """Chunks of a shard through all partitions, the same for all: a shorter shard ends in an empty chunk."""
        last = self.elements - (self.partitions - 1) * self.partition
        longest = -(-last // self.members)
        return (self.partitions - 1) * self.slots + max(1, -(-longest // self.chunk))

    def span(self, shard: int, round_: int) -> Span:
        """The chunk of ``shard`` in ``round_``; empty where a shard is shorter than the longest."""
        number, index = divmod(round_, self.slots)
        if number >= self.partitions:  # only the last partition may be longer than its slots say, and it is not
            raise ValueError(f"round {round_} is not in {self}")
        begin = number * self.partition
        base, extra = divmod(min(self.partition, self.elements - begin), self.members)
        start = begin + shard * base + min(shard, extra)
        stop = start + base + (shard < extra)
        first = min(start + index * self.chunk, stop)
        return Span(first, min(first + self.chunk, stop))

    def shard_spans(self, shard: int) -> Iterator[Span]:
        """The spans of ``shard``, one for each partition: what is summed in one order."""
        for number in range(self.partitions):
            begin = number * self.partition
            size = min(self.partition, self.elements - begin)
            span = shards(size, self.members)[shard]
            yield Span(begin + span.start, begin + span.stop)
