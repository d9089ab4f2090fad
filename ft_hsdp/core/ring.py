"""The ring all-reduce of one bucket (FT-HSDP §4.2).

Its operations, how it is cut into chunks, and what is done next.

Operations: N members need N-1 reduce-scatter and N-1 all-gather steps (the paper's index has an erratum), which
are 2N-1 operations at each of them. A member that contributes nothing relays: it adds nothing, so zeros and NaNs
of its own cannot enter the sum.

Plan: a bucket is cut into partitions, a partition into one shard for each member, a shard into chunks. The plan is
a pure function of sizes that every member knows, so a peer never sends a size. Rounds count the chunks of a shard
through all partitions, so a partition does not drain the pipe (FT-HSDP §4.2 starts each partition on an empty
one).

Pipeline: the counters of one all-reduce at one member. No bytes and no clock: what happened goes in, what to do
comes out. Each operation counts the rounds that are ready, posted and done; the chunks of one operation come in
order, operations overlap in any way. ft_hsdp/ftar/allreduce.py drives it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class OperationKind(Enum):
    """The five kinds of operations (FT-HSDP §4.2, "Optimizations")."""

    COPY_SEND = "copy-send"
    REDUCE_SEND = "reduce-send"
    REDUCE_STORE_SEND = "reduce-store-send"
    STORE_SEND = "store-send"
    STORE = "store"

    @property
    def reduces(self) -> bool:
        """Whether what it receives is a partial sum, to which the local gradient is added."""
        return self in (OperationKind.REDUCE_SEND, OperationKind.REDUCE_STORE_SEND)

    @property
    def adds(self) -> bool:
        """Whether the local gradient goes into its outcome."""
        return self is OperationKind.COPY_SEND or self.reduces

    @property
    def stores(self) -> bool:
        """Whether its outcome is a final sum, which belongs into the output."""
        return self not in (OperationKind.COPY_SEND, OperationKind.REDUCE_SEND)

    @property
    def sends(self) -> bool:
        """Whether its result goes to the right neighbour."""
        return self is not OperationKind.STORE


@dataclass(frozen=True, slots=True)
class Operation:
    """What one member does with each chunk of one shard.

    What operation `number` sends, the right neighbour's operation `number + 1` receives.
    """

    number: int  # from 0 to 2N-2
    kind: OperationKind
    shard: int  # number of the shard, from 0


def operations(position: int, members: int) -> tuple[Operation, ...]:
    """Return the 2N-1 operations (FT-HSDP §4.2) of the member at `position` of a ring of `members`.

    A ring of one has one operation, which stores.

    Raises:
        ValueError: the position is not in the ring.
    """
    if not 0 <= position < members:
        raise ValueError(f"position {position} is not in a ring of {members}")
    if members == 1:
        return (Operation(0, OperationKind.STORE, 0),)
    return tuple(
        Operation(number, _kind(number, members), (position - number) % members)
        for number in range(2 * members - 1)
    )


def _kind(number: int, members: int) -> OperationKind:
    if number == 0:
        return OperationKind.COPY_SEND
    if number < members - 1:
        return OperationKind.REDUCE_SEND
    if number == members - 1:
        return OperationKind.REDUCE_STORE_SEND
    return OperationKind.STORE_SEND if number < 2 * members - 2 else OperationKind.STORE


def fold_order(shard: int, ring: Sequence[int], contributors: frozenset[int]) -> tuple[int, ...]:
    """Return the replicas whose gradients are added to a `shard`, in the order of addition.

    The sum starts at the position in the `ring` with the shard's number and goes round once; those that are no
    `contributors` are skipped.
    """
    members = len(ring)
    order = (ring[(shard + k) % members] for k in range(members))
    return tuple(r for r in order if r in contributors)


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a flat buffer."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements in the span."""
        return self.stop - self.start


def shards(elements: int, members: int) -> tuple[Span, ...]:
    """Return `elements` cut into one span for each of `members`; their sizes differ by one element at most.

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


LEAST, MOST = 2**20, 8 * 2**20  # bytes of a chunk whose size `RingPlan.cut` chooses
PIECES = 4  # chunks of a shard that it aims at


@dataclass(frozen=True, slots=True)
class RingPlan:
    """How a bucket goes round a ring: partitions have at most chunk x slots x members elements (FT-HSDP §4.2).

    Raises:
        ValueError: a size is out of range.
    """

    elements: int  # of the bucket
    members: int  # size of the ring
    chunk: int  # elements of a chunk, at most
    slots: int  # chunks that are on their way to a neighbour at once
    edges: tuple[int, ...] = ()  # elements, ascending, at which a chunk ends: the bucket lies in several pieces

    def __post_init__(self) -> None:
        wrong = self.elements < 0 or self.members < 1 or self.chunk < 1 or self.slots < 1
        if wrong or list(self.edges) != sorted({e for e in self.edges if 0 < e < self.elements}):
            raise ValueError(f"no such plan: {self}")

    @staticmethod
    def cut(
        elements: int,
        itemsize: int,
        members: int,
        slots: int,
        chunk_bytes: int | None = None,
        edges: tuple[int, ...] = (),
    ) -> RingPlan:
        """Return how a bucket goes round the ring; the same in all members.

        Without `chunk_bytes` a shard is cut into enough chunks to overlap adding with receiving. But no chunk is
        so small that waking a thread for it costs more than it brings.

        Args:
            elements: size of the bucket.
            itemsize: bytes of an element.
            members: size of the ring.
            slots: C, chunks that are in flight to a neighbour at once.
            chunk_bytes: S, size of a chunk; None: chosen here.
            edges: elements at which a chunk ends. They do not change which shard an element is in, so neither the
                order of addition.
        """
        shard = -(-elements * itemsize // members)
        chunk = chunk_bytes or min(MOST, max(LEAST, -(-shard // PIECES)))
        return RingPlan(elements, members, max(1, chunk // itemsize), slots, edges)

    @property
    def partition(self) -> int:
        """Elements of a full partition."""
        return self.chunk * self.slots * self.members

    @property
    def partitions(self) -> int:
        """Number of partitions. An empty bucket is one empty partition, because its frames carry the headers."""
        return max(1, -(-self.elements // self.partition))

    @property
    def rounds(self) -> int:
        """Chunks of a shard through all partitions.

        It is the same for all shards: one with fewer chunks ends in empty ones.
        """
        return len(_chunks(self)[0])

    def span(self, shard: int, round_: int) -> Span:
        """Return the chunk of a `shard` in `round_`, from 0; empty where another shard has more chunks.

        Raises:
            ValueError: the plan has no such round.
        """
        if not 0 <= round_ < self.rounds:
            raise ValueError(f"round {round_} is not in {self}")
        return _chunks(self)[shard][round_]

    def shard_spans(self, shard: int) -> Iterator[Span]:
        """Yield the spans of a `shard`, one for each partition. All its elements are summed in one order."""
        for number in range(self.partitions):
            begin = number * self.partition
            size = min(self.partition, self.elements - begin)
            span = shards(size, self.members)[shard]
            yield Span(begin + span.start, begin + span.stop)


@lru_cache(maxsize=256)
def _chunks(plan: RingPlan) -> tuple[tuple[Span, ...], ...]:
    """Return the chunks of each shard, by round; as many for each shard in each partition."""
    found: list[list[Span]] = [[] for _ in range(plan.members)]
    for spans in zip(*map(plan.shard_spans, range(plan.members)), strict=True):
        for chunks, span in zip(found, spans, strict=True):
            chunks += _cut(span, plan)
        rounds = max(map(len, found))
        for chunks, span in zip(found, spans, strict=True):
            chunks += [Span(span.stop, span.stop)] * (rounds - len(chunks))
    return tuple(map(tuple, found))


def _cut(span: Span, plan: RingPlan) -> list[Span]:
    """Return the chunks of one shard in one partition: each ends at an edge, or is full, or is the last one."""
    inner = plan.edges[bisect_right(plan.edges, span.start) : bisect_left(plan.edges, span.stop)]
    found = [
        Span(first, min(first + plan.chunk, stop))
        for start, stop in itertools.pairwise((span.start, *inner, span.stop))
        for first in range(start, stop, plan.chunk)
    ]
    return found or [Span(span.stop, span.stop)]


@dataclass(frozen=True, slots=True)
class ProcessChunk:
    """Give a chunk to the data plane, which copies, reduces or stores it."""

    operation: Operation
    round: int  # number of the chunk in its shard
    empty: bool  # no gradient is in the sum yet


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Send the result of `operation` for one round to the right neighbour."""

    operation: Operation
    round: int  # number of the chunk in its shard
    empty: bool  # without a payload: no gradient is in the sum yet


Step = ProcessChunk | SendChunk


class OutOfOrder(ValueError):
    """A chunk is not the next one of its operation."""


@dataclass(slots=True)
class Counter:
    """Rounds of one operation."""

    ready: int = 0  # chunks that arrived, or that were given locally
    posted: int = 0  # chunks that were handed to the data plane
    done: int = 0  # chunks that the data plane finished


class Pipeline:
    """One all-reduce at one member. Invariant of each operation: done <= posted <= ready <= rounds.

    Args:
        plan: the plan, equal at all members.
        position: of this member in the ring.
        contributes: whether it adds its gradient; otherwise it relays what it gets.
        depth: chunks that the data plane takes at once.
    """

    def __init__(self, plan: RingPlan, position: int, contributes: bool, depth: int = 1) -> None:
        self.plan = plan
        self.operations = operations(position, plan.members)
        self.counters = tuple(Counter() for _ in self.operations)
        self._contributes = contributes
        self._rounds = plan.rounds
        self._room = depth
        self._waiting = 0
        self._empty: set[tuple[int, int]] = set()

    @property
    def finished(self) -> bool:
        """Whether every operation has done every round; sends may still be on their way."""
        return all(c.done == self._rounds for c in self.counters)

    @property
    def frames(self) -> int:
        """Number of chunks that come from the left neighbour in all."""
        return self._rounds * (len(self.operations) - 1)

    def start(self) -> list[Step]:
        """Return what to do before any chunk has arrived: post as many own chunks as there are slots."""
        alone = self.plan.members == 1
        for _ in range(self._rounds if alone else min(self.plan.slots, self._rounds)):
            self._ready(0, not self._contributes)
        return self._post()

    def arrived(self, number: int, round_: int, empty: bool) -> list[Step]:
        """Take note of the left neighbour's chunk and return what to do next, in this order.

        The first operation's chunk of the neighbour lets one more own chunk go, so no member runs ahead of the
        ring by more than the slots.

        Args:
            number: the operation that receives the chunk.
            round_: number of the chunk in its shard.
            empty: whether it came without a payload.

        Raises:
            OutOfOrder: it is not the next chunk of that operation, or it is empty where sums are final.
        """
        if not 0 < number < len(self.operations):
            raise OutOfOrder(f"no operation {number} receives in a ring of {self.plan.members}")
        if round_ != self.counters[number].ready or round_ >= self._rounds:
            raise OutOfOrder(
                f"operation {number} got round {round_} of {self._rounds}, next is {self.counters[number].ready}"
            )
        if empty and not self.operations[number].kind.reduces:
            raise OutOfOrder(f"operation {number} got an empty chunk of a final sum")
        self._ready(number, empty)
        if number == 1 and self.counters[0].ready < self._rounds:
            self._ready(0, not self._contributes)
        return self._post()

    def processed(self, number: int) -> list[Step]:
        """Take note that the data plane finished the next round of operation `number`; return what to do next.

        Raises:
            OutOfOrder: no chunk of that operation is posted.
        """
        counter, operation = self.counters[number], self.operations[number]
        round_ = counter.done
        if round_ >= counter.posted:
            raise OutOfOrder(f"operation {number} finished round {round_} before it was posted")
        counter.done += 1
        self._room += 1
        steps: list[Step] = []
        if operation.kind.sends:
            steps.append(SendChunk(operation, round_, self._sends_nothing(operation, round_)))
        return steps + self._post()

    def _sends_nothing(self, operation: Operation, round_: int) -> bool:
        """Return whether the result is sent without a payload.

        A partial sum stays empty until a member contributes. A final sum without contributors is zeros, not
        empty.
        """
        if (operation.number, round_) not in self._empty:
            return False
        self._empty.discard((operation.number, round_))
        return operation.kind is not OperationKind.REDUCE_STORE_SEND and not self._contributes

    def _ready(self, number: int, empty: bool) -> None:
        counter = self.counters[number]
        if empty:
            self._empty.add((number, counter.ready))
        counter.ready += 1
        self._waiting += 1

    def _post(self) -> list[Step]:
        """Hand chunks to the data plane while it takes them, those of the highest operation first.

        They are nearest to the end.
        """
        steps: list[Step] = []
        while self._room and self._waiting:
            number = max(n for n, c in enumerate(self.counters) if c.posted < c.ready)
            counter = self.counters[number]
            steps.append(
                ProcessChunk(self.operations[number], counter.posted, (number, counter.posted) in self._empty)
            )
            counter.posted += 1
            self._room -= 1
            self._waiting -= 1
        return steps
