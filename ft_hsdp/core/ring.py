"""Ring: who sends which shard in which round of a ring all-reduce, and in which order a shard is summed.

FT-HSDP §4.2 with the index erratum: N members need N-1 reduce-scatter rounds and N-1 all-gather rounds. A
member that contributes nothing relays: it adds nothing, so zeros and NaNs of its own cannot enter the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """One round at one position: the shard that is sent right and the one that is received from the left.

    ``reduce`` says whether what arrives is a partial sum (reduce-scatter) or final (all-gather).
    """

    send: int
    receive: int
    reduce: bool


def rounds(position: int, members: int) -> tuple[Round, ...]:
    """The 2N-2 rounds of the member at ``position``; none for a ring of one.

    What is received in round t is what is sent in round t+1, so a chunk can be passed on as soon as it is
    here.
    """
    if not 0 <= position < members:
        raise ValueError(f"position {position} is not in a ring of {members}")
    return tuple(
        Round((position - t) % members, (position - t - 1) % members, t < members - 1)
        for t in range(2 * members - 2)
    )


def fold_order(shard: int, ring: Sequence[int], contributors: frozenset[int]) -> tuple[int, ...]:
    """The replicas whose gradients are added to shard ``shard``, in the order of addition.

    The sum starts at the position with the shard's number and goes once round; relays are skipped.
    """
    members = len(ring)
    order = (ring[(shard + k) % members] for k in range(members))
    return tuple(r for r in order if r in contributors)
