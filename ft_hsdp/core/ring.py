"""Ring: which operation a member does with which shard, and in which order a shard is summed.

FT-HSDP §4.2 with the index erratum: N members need N-1 reduce-scatter and N-1 all-gather steps, which are 2N-1
operations at each of them. A member that contributes nothing relays: it adds nothing, so zeros and NaNs of its own
cannot enter the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The five kinds of operations (FT-HSDP §4.2, "Optimizations")."""

    COPY_SEND = "copy-send"
    REDUCE_SEND = "reduce-send"
    REDUCE_STORE_SEND = "reduce-store-send"
    STORE_SEND = "store-send"
    STORE = "store"

    @property
    def receives(self) -> bool:
        """Whether it works on what the left neighbour sent."""
        return self is not Kind.COPY_SEND

    @property
    def reduces(self) -> bool:
        """Whether what it receives is a partial sum, to which the local gradient is added."""
        return self in (Kind.REDUCE_SEND, Kind.REDUCE_STORE_SEND)

    @property
    def sends(self) -> bool:
        """Whether its outcome goes to the right neighbour."""
        return self is not Kind.STORE


@dataclass(frozen=True, slots=True)
class Operation:
    """What one member does with each chunk of ``shard``; what operation ``number`` sends is what the right
    neighbour's operation ``number + 1`` receives."""

    number: int
    kind: Kind
    shard: int


def operations(position: int, members: int) -> tuple[Operation, ...]:
    """The 2N-1 operations of the member at ``position`` (FT-HSDP §4.2); a ring of one only stores.

    Raises:
        ValueError: the position is not in the ring.
    """
    if not 0 <= position < members:
        raise ValueError(f"position {position} is not in a ring of {members}")
    if members == 1:
        return (Operation(0, Kind.STORE, 0),)
    return tuple(
        Operation(number, _kind(number, members), (position - number) % members)
        for number in range(2 * members - 1)
    )


def _kind(number: int, members: int) -> Kind:
    if number == 0:
        return Kind.COPY_SEND
    if number < members - 1:
        return Kind.REDUCE_SEND
    if number == members - 1:
        return Kind.REDUCE_STORE_SEND
    return Kind.STORE_SEND if number < 2 * members - 2 else Kind.STORE


def fold_order(shard: int, ring: Sequence[int], contributors: frozenset[int]) -> tuple[int, ...]:
    """The replicas whose gradients are added to shard ``shard``, in the order of addition.

    The sum starts at the position with the shard's number and goes once round; relays are skipped.
    """
    members = len(ring)
    order = (ring[(shard + k) % members] for k in range(members))
    return tuple(r for r in order if r in contributors)
