"""The header in front of every chunk, and the entries that tell what each member contributed.

Everything in a header is checked against the local plan before memory is touched. So no chunk of another epoch,
step, attempt, bucket or round is ever reduced, and a peer never tells us a size.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ft_hsdp.core.commit import MAX_ROWS, Contribution, impossible
from ft_hsdp.core.ring import Operation, RingPlan, Span
from ft_hsdp.errors import ProtocolViolation, StaleEpoch

MAGIC = 0x46544152  # "FTAR"
HEADER = struct.Struct("!IIIHHHBBII16s")
_SQUARE = struct.Struct("!d")  # in front, because it differs from bucket to bucket
_ENTRY_HEAD = struct.Struct("!HHHHd")  # replica, data shard, zero, number of runs, loss
_ENTRY_RUN = struct.Struct("!QQIHH")  # first unit, weight, units, part, zero
# All entries are equally long: a peer tells us no size.
ENTRY_BYTES = _SQUARE.size + _ENTRY_HEAD.size + MAX_ROWS * _ENTRY_RUN.size
EMPTY = 1  # flag of a chunk without a payload
LARGEST = (2 - 2**-23) * 2.0**127  # number in fp32


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies an all-reduce; all members must use the same key."""

    epoch: int
    step: int
    attempt: int  # of the step: a failed one is repeated with a larger number
    bucket: int  # of the gradient
    prev: str  # lineage of the state that the step builds on, 32 hex digits


@dataclass(frozen=True, slots=True)
class Entry:
    """What one member contributed. Entries travel with the frames of the reduce-scatter."""

    replica: int
    contributions: tuple[Contribution, ...] = ()  # at most `MAX_ROWS`, of one data shard; (): it relayed
    square: float = 0.0  # sum of squares of its gradient of the bucket

    @property
    def poisoned(self) -> bool:
        """Whether its gradient, or the squares of it, are not finite in fp32."""
        return not 0 <= self.square <= LARGEST

    @property
    def weight(self) -> int:
        """The weight of all that it contributed; 0: nothing, or nothing that counts."""
        return sum(c.weight for c in self.contributions)

    def pack(self) -> bytes:
        """Return the `ENTRY_BYTES` of this entry on the wire.

        Raises:
            ValueError: it has more than `MAX_ROWS` contributions.
        """
        runs = self.contributions
        if len(runs) > MAX_ROWS:
            raise ValueError(f"{len(runs)} contributions do not fit into an entry of {MAX_ROWS}")
        shard, loss = (runs[0].shard, runs[0].loss) if runs else (0, 0.0)
        head = _SQUARE.pack(self.square) + _ENTRY_HEAD.pack(self.replica, shard, 0, len(runs), loss)
        body = b"".join(_ENTRY_RUN.pack(c.index, c.weight, c.units, c.part, 0) for c in runs)
        return (head + body).ljust(ENTRY_BYTES, b"\0")


def unpack_entries(data: bytes) -> tuple[Entry, ...]:
    """Return the entries in `data`, whose length is a multiple of `ENTRY_BYTES`.

    Raises:
        ProtocolViolation: an entry says what no replica can have trained.
    """
    starts = range(0, len(data), ENTRY_BYTES)
    return tuple(
        replace(_unpack_entry(data[at + _SQUARE.size : at + ENTRY_BYTES]), square=_SQUARE.unpack_from(data, at)[0])
        for at in starts
    )


# What else a member says comes again with each chunk and bucket of a step, so it is looked at once.
@lru_cache(maxsize=256)
def _unpack_entry(data: bytes) -> Entry:
    replica, shard, _, count, loss = _ENTRY_HEAD.unpack_from(data)
    if count > MAX_ROWS:
        raise ProtocolViolation(f"replica {replica} says {count} contributions; at most {MAX_ROWS} are allowed")
    rows: list[Contribution] = []
    for at in range(count):
        index, weight, units, part, _ = _ENTRY_RUN.unpack_from(data, _ENTRY_HEAD.size + at * _ENTRY_RUN.size)
        rows.append(Contribution(replica, weight, shard, index, loss, units, part))
    if wrong := impossible(rows):
        raise ProtocolViolation(f"replica {replica} says {wrong}")
    return Entry(replica, tuple(rows))


@dataclass(frozen=True, slots=True)
class Frame:
    """A chunk whose header was found to be what the plan says."""

    operation: Operation  # that receives it
    round: int
    span: Span  # its elements in the message
    nbytes: int  # of the payload
    entries: int  # how many entries stand between header and payload
    empty: bool  # no member has contributed to it yet: there is no payload


class FrameOrder:
    """Checks the order of the frames of one all-reduce on one connection, so that no memory is written twice.

    Args:
        alone: all frames come on this connection, so that none may be left out. Otherwise each comes once, on one
            of several connections.
    """

    def __init__(self, alone: bool = True) -> None:
        self._alone = alone
        self._next: dict[int, int] = {}

    def check(self, frame: Frame) -> None:
        """Accept the next chunk of its operation.

        Raises:
            ProtocolViolation: its round was received before, or rounds are missing.
        """
        number = frame.operation.number
        expected = self._next.get(number, 0)
        if frame.round < expected or (self._alone and frame.round > expected):
            raise ProtocolViolation(f"operation {number} got round {frame.round}, next is {expected}")
        self._next[number] = frame.round + 1


@dataclass(frozen=True, slots=True)
class Framing:
    """Writes and checks the headers of one all-reduce at one member."""

    key: Key
    plan: RingPlan
    operations: Sequence[Operation]  # of this member
    itemsize: int  # bytes of an element
    dtype: int  # index of the type in `allreduce.DTYPES`

    def header(self, operation: Operation, round_: int, empty: bool) -> bytes:
        """Return the header of the chunk that `operation` sends in `round_`.

        The right neighbour receives it in its operation `operation.number + 1`.
        """
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
        """Return how many entries come with the chunk that operation `number` receives in `round_`."""
        return number if round_ == 0 and number < self.plan.members else 0

    def check(self, data: bytes) -> Frame:
        """Decode a header of the left neighbour and check it against the plan.

        Args:
            data: `HEADER.size` bytes.

        Raises:
            StaleEpoch: it belongs to another epoch, step or attempt, or builds on another lineage.
            ProtocolViolation: it is not what the plan says.
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
