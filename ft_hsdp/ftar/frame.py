"""Frame: the header in front of every chunk, and the entries that say who put what into the sum.

Everything in a header is checked against the local plan before memory is touched: nothing of another epoch, step,
attempt, bucket or round is ever reduced, and a peer never tells us a size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ft_hsdp.core.ring import Operation, RingPlan, Span
from ft_hsdp.errors import ProtocolViolation, StaleEpoch

MAGIC = 0x46544152  # "FTAR"
HEADER = struct.Struct("!IIIHHHBBII16s")
ENTRY = struct.Struct("!HHHHQd")
EMPTY = 1


@dataclass(frozen=True, slots=True)
class Key:
    """What an all-reduce is about; ``prev`` is the lineage that it builds on (32 hex digits)."""

    epoch: int
    step: int
    attempt: int
    bucket: int
    prev: str


@dataclass(frozen=True, slots=True)
class Entry:
    """What one member put into the sum. Weight 0: it relayed. Travels in the frames of the reduce-scatter."""

    replica: int
    weight: int
    shard: int
    index: int
    loss: float
    poisoned: bool = False

    def pack(self) -> bytes:
        """24 bytes."""
        flags = int(self.poisoned)
        return ENTRY.pack(self.replica, self.weight, self.shard, flags, self.index, self.loss)


def unpack_entries(data: bytes) -> tuple[Entry, ...]:
    """The entries in ``data``."""
    return tuple(
        Entry(replica, weight, shard, index, loss, bool(flags))
        for replica, weight, shard, flags, index, loss in ENTRY.iter_unpack(data)
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """A chunk that was announced as the plan says: ``nbytes`` of payload for ``span`` after ``entries``."""

    operation: Operation
    round: int
    span: Span
    nbytes: int
    entries: int
    empty: bool


class FrameOrder:
    """The order of the frames of one all-reduce on one connection: no memory is written twice.

    ``alone``: all its frames come this way; otherwise every one of them comes once, here or elsewhere.
    """

    def __init__(self, alone: bool = True) -> None:
        self._alone = alone
        self._next: dict[int, int] = {}

    def check(self, frame: Frame) -> None:
        """Let the next chunk of its operation pass.

        Raises:
            ProtocolViolation: it is not.
        """
        number = frame.operation.number
        expected = self._next.get(number, 0)
        if frame.round < expected or (self._alone and frame.round > expected):
            raise ProtocolViolation(f"operation {number} got round {frame.round}, next is {expected}")
        self._next[number] = frame.round + 1


@dataclass(frozen=True, slots=True)
class Framing:
    """How the frames of one all-reduce look: written for the right neighbour, expected from the left one."""

    key: Key
    plan: RingPlan
    operations: Sequence[Operation]
    itemsize: int
    dtype: int

    def header(self, operation: Operation, round_: int, empty: bool) -> bytes:
        """The header of the chunk that ``operation`` sends, which the neighbour receives in its next one."""
        key, number = self.key, operation.number + 1
        nbytes = 0 if empty else self.plan.span(operation.shard, round_).size * self.itemsize
        return HEADER.pack(
            MAGIC,
            key.epoch,
            key.step,
            key.attempt,
            key.bucket,
            number,
            EMPTY if empty else 0,
            self.dtype,
            round_,
            nbytes,
            bytes.fromhex(key.prev),
        )

    def entries(self, number: int, round_: int) -> int:
        """How many members' entries come with the chunk that operation ``number`` receives."""
        return number if round_ == 0 and number < self.plan.members else 0

    def check(self, data: bytes) -> Frame:
        """What the left neighbour announces.

        Raises:
            StaleEpoch: it is in another epoch, step or attempt, or builds on another lineage.
            ProtocolViolation: the header is not what the plan says.
        """
        magic, epoch, step, attempt, bucket, number, flags, dtype, round_, nbytes, prev = HEADER.unpack(data)
        key = self.key
        if magic != MAGIC or flags not in (0, EMPTY):
            raise ProtocolViolation("a frame does not start with FTAR's magic, or has unknown flags")
        if (epoch, step, attempt) != (key.epoch, key.step, key.attempt):
            raise StaleEpoch(
                f"neighbour is at epoch {epoch} step {step} attempt {attempt}, "
                f"not at epoch {key.epoch} step {key.step} attempt {key.attempt}"
            )
        if prev.hex() != key.prev:
            raise StaleEpoch(f"neighbour builds step {step} on lineage {prev.hex()[:8]}, not on {key.prev[:8]}")
        if (bucket, dtype) != (key.bucket, self.dtype):
            raise ProtocolViolation(
                f"frame of bucket {bucket}, type {dtype}; expected: bucket {key.bucket}, type {self.dtype}"
            )
        if not 0 < number < len(self.operations) or round_ >= self.plan.rounds:
            raise ProtocolViolation(f"frame says operation {number} round {round_}, which the plan does not have")
        operation = self.operations[number]
        span, empty = self.plan.span(operation.shard, round_), bool(flags & EMPTY)
        expected = 0 if empty else span.size * self.itemsize
        if nbytes != expected or (empty and not operation.kind.reduces):
            raise ProtocolViolation(
                f"frame of operation {number} round {round_} has {nbytes} bytes, the plan says {expected}"
            )
        return Frame(operation, round_, span, nbytes, self.entries(number, round_), empty)
