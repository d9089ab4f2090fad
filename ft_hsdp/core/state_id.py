"""The name of a committed state, and the comparison of states that have one name.

FT-HSDP §4.3 calls the replicas with the highest step number healthy. Two replicas can reach one step number by
different commits, so a step number alone hides a divergence. Here a state is named by the epoch that committed it,
its step, and its lineage: a hash chained over everything that was applied.

Equal names mean equal bits unless memory is corrupted silently. To find that, every rank sends with its vote a
digest of one slice of its state, another slice at each step, so that `SLICES` steps cover all of it. FT-HSDP
leaves silent corruption of a replica's state to its operator; DeadPool assumes that there is none.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

LINEAGE_BYTES = 16


@dataclass(frozen=True, slots=True)
class StateId:
    """The name of a committed state."""

    commit_epoch: int  # the epoch whose token decided the step; 0: initial weights
    step: int  # number of committed steps in the state
    lineage: str  # 32 hex digits, chained over all these steps

    def __str__(self) -> str:
        return f"({self.commit_epoch}, {self.step}, {self.lineage[:8]})"


def canonical(value: object) -> str:
    """Return JSON of `value` that is the same for equal values: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest(*parts: object) -> str:
    """Return the BLAKE2b hash of canonical JSON of `parts`, as 32 hex digits."""
    return hashlib.blake2b(canonical(parts).encode(), digest_size=LINEAGE_BYTES).hexdigest()


def initial(config_hash: str, weights_digest: str) -> StateId:
    """Return the state before the first step, of epoch 0, which is a committed state like any other.

    Its lineage is the hash of `config_hash`, on which all replicas agree, and `weights_digest`.
    """
    return StateId(0, 0, digest("initial", config_hash, weights_digest))


def advance(
    prev: str,
    epoch: int,
    attempt: int,
    step: int,
    contributions: Iterable[tuple[int, ...]],
    reduced: str,
) -> str:
    """Return the lineage after one more step.

    Args:
        prev: the lineage before.
        epoch: of the attempt that was committed.
        attempt: its number.
        step: number of the step.
        contributions: (replica, weight, data shard, first unit, units, part), in any order.
        reduced: rank-ordered hash of the reduced gradient shards.

    Returns:
        32 hex digits.
    """
    return digest(prev, epoch, attempt, step, sorted(contributions), reduced)


def newer(a: StateId, b: StateId) -> bool:
    """Return whether `a` is above `b`: by (commit_epoch, step), never by step alone."""
    return (a.commit_epoch, a.step) > (b.commit_epoch, b.step)


def same(a: StateId, b: StateId) -> bool:
    """Return whether two replicas that report `a` and `b` hold the same bits."""
    return a == b


SLICES = 16

Digests = tuple[tuple[int, str], ...]  # (replica, digest of its slice), of verified members only


def slice_number(step: int) -> int:
    """Return the number of the slice that is compared after `step` steps, in [0, SLICES)."""
    return step % SLICES


def slice_bounds(nbytes: int, step: int) -> tuple[int, int]:
    """Return the slice [begin, end) of a state of `nbytes` bytes that is compared after `step` steps.

    Any `SLICES` steps in a row cover all of it.
    """
    n = slice_number(step)
    return nbytes * n // SLICES, nbytes * (n + 1) // SLICES


def differ(digests: Digests) -> bool:
    """Return whether not all `digests` are equal."""
    return len({digest for _, digest in digests}) > 1


def minority(digests: Digests) -> tuple[int, ...]:
    """Return the replicas, sorted, that differ from more than half of the `digests`; () without such a half."""
    (most, votes), *_ = Counter(digest for _, digest in digests).most_common(1)
    if 2 * votes <= len(digests):
        return ()
    return tuple(sorted(replica for replica, digest in digests if digest != most))


def describe(digests: Digests, state: StateId) -> str:
    """Return one line for people: which replicas differ from which, by their `digests` of `state`."""
    where = f"in slice {slice_number(state.step)} of {state}"
    few = minority(digests)
    if few:
        rest = sorted(replica for replica, _ in digests if replica not in few)
        return f"replicas {_list(few)} differ {where} from replicas {_list(rest)}, which agree"
    all_of_them = sorted(replica for replica, _ in digests)
    return f"replicas {_list(all_of_them)} hold different states {where}; no majority says which is right"


def _list(replicas: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, replicas))
