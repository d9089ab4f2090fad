"""Schedule: which chunk an operation works on, and what the device is told to do with it. No tensors.

The same cut as the ring's own plan: partitions, a shard for each member, chunks, rounds that never start again.
It is here so that the reference, the checks and the bench need nothing else of the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

FROM_RECV = 1
FROM_LOCAL = 2
TO_SEND = 4
TO_OUT = 8


class Kind(Enum):
    """The five kinds of operations (FT-HSDP §4.2, "Optimizations")."""

    COPY_SEND = "copy-send"
    REDUCE_SEND = "reduce-send"
    REDUCE_STORE_SEND = "reduce-store-send"
    STORE_SEND = "store-send"
    STORE = "store"

    @property
    def adds(self) -> bool:
        """Whether the local gradient goes into the outcome."""
        return self in (Kind.COPY_SEND, Kind.REDUCE_SEND, Kind.REDUCE_STORE_SEND)

    @property
    def stores(self) -> bool:
        """Whether the outcome is final, so that it belongs into the output."""
        return self in (Kind.REDUCE_STORE_SEND, Kind.STORE_SEND, Kind.STORE)

    @property
    def sends(self) -> bool:
        """Whether the outcome goes to the right neighbour."""
        return self is not Kind.STORE


@dataclass(frozen=True, slots=True)
class Command:
    """One chunk for the device: elements [start, stop) of the message.

    ``recv`` and ``send`` are the chunk's first element in the receive and in the send buffer; ``recv`` is None if
    nothing came (nobody contributed yet, or the operation does not receive), ``send`` if nothing goes on.
    """

    kind: Kind
    start: int
    stop: int
    recv: int | None = None
    send: int | None = None

    def mode(self, contributes: bool) -> int:
        """What to read and what to write, as FROM_ and TO_ bits; 0 if there is nothing to do.

        A member that does not contribute relays; an outcome without any source that is stored is zeros.
        """
        mode = FROM_RECV if self.recv is not None else 0
        if contributes and (self.kind.adds or self.recv is None):
            mode |= FROM_LOCAL
        if self.kind.stores:
            mode |= TO_OUT
        elif not mode:
            return 0
        if self.kind.sends and self.send is not None:
            mode |= TO_SEND
        return mode


def kinds(members: int) -> tuple[Kind, ...]:
    """The kinds of the 2N-1 operations, in order; a ring of one only stores."""
    if members == 1:
        return (Kind.STORE,)
    return (
        Kind.COPY_SEND,
        *(Kind.REDUCE_SEND for _ in range(members - 2)),
        Kind.REDUCE_STORE_SEND,
        *(Kind.STORE_SEND for _ in range(members - 2)),
        Kind.STORE,
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """``elements`` round a ring of ``members`` in chunks of at most ``chunk`` elements, ``slots`` of them at
    once."""

    elements: int
    members: int
    chunk: int
    slots: int

    @property
    def partition(self) -> int:
        """Elements of a full partition."""
        return self.chunk * self.slots * self.members

    @property
    def rounds(self) -> int:
        """Chunks of a shard through all partitions."""
        partitions = max(1, -(-self.elements // self.partition))
        last = self.elements - (partitions - 1) * self.partition
        longest = -(-last // self.members)
        return (partitions - 1) * self.slots + max(1, -(-longest // self.chunk))

    @property
    def commands(self) -> int:
        """Chunks that one member processes in all."""
        return self.rounds * len(kinds(self.members))

    def shard(self, position: int, number: int) -> int:
        """The shard that the member at ``position`` works on in its operation ``number``."""
        return (position - number) % self.members

    def span(self, shard: int, round_: int) -> tuple[int, int]:
        """The chunk of ``shard`` in ``round_`` as [start, stop); empty where a shard is shorter than the
        longest."""
        begin, index = round_ // self.slots * self.partition, round_ % self.slots
        base, extra = divmod(min(self.partition, self.elements - begin), self.members)
        start = begin + shard * base + min(shard, extra)
        stop = start + base + (shard < extra)
        first = min(start + index * self.chunk, stop)
        return first, min(first + self.chunk, stop)

    def spans(self, shard: int) -> Iterator[tuple[int, int]]:
        """All chunks of ``shard``."""
        return (self.span(shard, round_) for round_ in range(self.rounds))
