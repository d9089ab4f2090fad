"""Ring: which operation a member does with which shard, and in which order a shard is summed.

FT-HSDP §4.2 with the index erratum: N members need N-1 reduce-scatter and N-1 all-gather steps, which are 2N-1
operations at each of them. A member that contributes nothing relays: it adds nothing, so zeros and NaNs of its own
cannot enter the sum.

Partition: how a message is cut into partitions, those into a shard for each member, a shard into chunks.

The plan is a pure function of sizes that every member knows, so a peer never tells us a size. Rounds count the
chunks of a shard through all partitions and never start again: a partition does not drain the pipe (FT-HSDP §4.2
starts each partition on an empty one).

Pipeline: the counters of one all-reduce at one member, and what may be done next (FT-HSDP §4.2).

No bytes and no clock: what happened goes in, what to do comes out. Each operation counts the rounds that are
ready, posted and done; chunks of one operation come in order, operations overlap as they like.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class OperationKind(Enum):
    """The five kinds of operations (FT-HSDP §4.2, "Optimizations")."""

    COPY_SEND = "copy-send"
    REDUCE_SEND = "reduce-send"
    REDUCE_STORE_SEND = "reduce-store-send"
    STORE_SEND = "store-send"
    STORE = "store"

    @property
    def receives(self) -> bool:
        """Whether it works on what the left neighbour sent."""
        return self is not OperationKind.COPY_SEND

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
        """Whether its outcome goes to the right neighbour."""
        return self is not OperationKind.STORE


@dataclass(frozen=True, slots=True)
class Operation:
    """What one member does with each chunk of ``shard``; what operation ``number`` sends is what the right
    neighbour's operation ``number + 1`` receives."""

    number: int
    kind: OperationKind
    shard: int


def operations(position: int, members: int) -> tuple[Operation, ...]:
    """The 2N-1 operations of the member at ``position`` (FT-HSDP §4.2); a ring of one only stores.

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
    """The replicas whose gradients are added to shard ``shard``, in the order of addition.

    The sum starts at the position with the shard's number and goes once round; relays are skipped.
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
class RingPlan:
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


@dataclass(frozen=True, slots=True)
class ProcessChunk:
    """Give the chunk of ``round`` to the data plane: copy, reduce or store it. ``empty``: it is no sum yet."""

    operation: Operation
    round: int
    empty: bool


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Send the outcome of ``operation`` for ``round`` to the right neighbour; ``empty``: without a payload."""

    operation: Operation
    round: int
    empty: bool


Step = ProcessChunk | SendChunk


class OutOfOrder(ValueError):
    """A chunk came that is not the next one of its operation."""


@dataclass(slots=True)
class Counter:
    """Rounds of one operation: arrived (or given locally), handed to the data plane, finished by it."""

    ready: int = 0
    posted: int = 0
    done: int = 0


class Pipeline:
    """One all-reduce of ``plan`` at ``position``. A member that does not contribute relays what it gets.

    ``depth`` is how many chunks the data plane takes at once. Invariant: done <= posted <= ready <= rounds.
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
        """How many chunks come from the left neighbour in all."""
        return self._rounds * (len(self.operations) - 1)

    def start(self) -> list[Step]:
        """What to do before anything has arrived: as many own chunks as there are slots."""
        alone = self.plan.members == 1
        for _ in range(self._rounds if alone else min(self.plan.slots, self._rounds)):
            self._ready(0, not self._contributes)
        return self._post()

    def arrived(self, number: int, round_: int, empty: bool) -> list[Step]:
        """The left neighbour's chunk for operation ``number`` is here.

        A first chunk from there lets one more of our own go: nobody runs ahead of the ring by more than the slots.

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
        """The data plane has finished the next round of operation ``number``."""
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
        """A partial sum stays empty until somebody contributes; a final one without contributors is zeros."""
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
        """Hand chunks to the data plane while it takes them, those that are nearest to their end first."""
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
