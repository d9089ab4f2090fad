"""Partition: how a flat gradient is cut into one shard for each ring position, and shards into chunks.

The plan is a pure function of (elements, members, chunk elements), so a peer never tells us a size: FT-HSDP
§4.2 with FTAR's contract that sizes come from the local plan.
"""

from __future__ import annotations

import itertools
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


def chunks(span: Span, chunk_elements: int) -> tuple[Span, ...]:
    """Cut a shard into chunks of at most ``chunk_elements``; an empty shard is one empty chunk.

    An empty shard still travels as one frame without payload: the frame carries the headers of the step.
    """
    if chunk_elements < 1:
        raise ValueError(f"chunk_elements must be at least 1, got {chunk_elements}")
    starts = range(span.start, max(span.stop, span.start + 1), chunk_elements)
    return tuple(Span(s, min(s + chunk_elements, span.stop)) for s in starts)
