"""Frame: the header in front of every chunk, and the entries that say who put what into the sum.

Everything in a header is checked against the local plan before memory is touched: nothing of another epoch, step,
attempt, bucket or round is ever reduced, and a peer never tells us a size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ft_hsdp.errors import ProtocolViolation, StaleEpoch

MAGIC = 0x46544152  # "FTAR"
HEADER = struct.Struct("!IIIHHHHIHxx16s")
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


def header(key: Key, round_: int, chunk: int, nbytes: int, entries: int, empty: bool) -> bytes:
    """The header of one chunk."""
    return HEADER.pack(
        MAGIC,
        key.epoch,
        key.step,
        key.attempt,
        key.bucket,
        round_,
        chunk,
        nbytes,
        (entries << 1) | (EMPTY if empty else 0),
        bytes.fromhex(key.prev),
    )


def check(data: bytes, key: Key, round_: int, chunk: int, nbytes: int, entries: int, may_be_empty: bool) -> bool:
    """Whether the chunk behind this header is empty (nobody contributed to it yet).

    Raises:
        StaleEpoch: the neighbour is in another epoch, step or attempt, or builds on another lineage.
        ProtocolViolation: the header is not what the plan says.
    """
    magic, epoch, step, attempt, bucket, r, c, size, packed, prev = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolViolation("a frame does not start with FTAR's magic")
    if (epoch, step, attempt) != (key.epoch, key.step, key.attempt):
        raise StaleEpoch(
            f"neighbour is at epoch {epoch} step {step} attempt {attempt}, "
            f"not at epoch {key.epoch} step {key.step} attempt {key.attempt}"
        )
    if prev.hex() != key.prev:
        raise StaleEpoch(f"neighbour builds step {step} on lineage {prev.hex()[:8]}, not on {key.prev[:8]}")
    empty = bool(packed & EMPTY)
    expected = 0 if empty else nbytes
    if (bucket, r, c, size, packed >> 1) != (key.bucket, round_, chunk, expected, entries) or (
        empty and not may_be_empty
    ):
        raise ProtocolViolation(
            f"frame says bucket {bucket} round {r} chunk {c} with {size} bytes, "
            f"the plan bucket {key.bucket} round {round_} chunk {chunk} with {expected}"
        )
    return empty
