"""StateId: which committed step a replica holds, and the chain of hashes that tells histories apart.

FT-HSDP §4.3 calls the replicas with the highest step number healthy. Two replicas can reach one step number
by different commits, so a step number alone hides a divergence. Here a state is named by the epoch that
committed it, its step and a hash chained over everything that was applied.

Divergence: whether replicas that call their states by one name hold the same bits, and who is wrong if not.

With its vote on a step every rank gives a digest of one slice of the state that it holds, another one at each
step, so that all of it is compared within ``SLICES`` steps. FT-HSDP leaves silent corruption of a replica's
state to its operator; DeadPool assumes that there is none.
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
    """The name of a committed state.

    ``commit_epoch`` is the epoch whose token decided the step (0 for initial weights), ``step`` the number of
    committed steps in it, ``lineage`` 32 hex digits chained over all of them.
    """

    commit_epoch: int
    step: int
    lineage: str

    def __str__(self) -> str:
        return f"({self.commit_epoch}, {self.step}, {self.lineage[:8]})"


def canonical(value: object) -> str:
    """JSON that is the same for equal values: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest(*parts: object) -> str:
    """Hash canonical JSON of ``parts``; 32 hex digits."""
    return hashlib.blake2b(canonical(parts).encode(), digest_size=LINEAGE_BYTES).hexdigest()


def initial(config_hash: str, weights_digest: str) -> StateId:
    """The state before the first step: it is a committed state like any other."""
    return StateId(0, 0, digest("initial", config_hash, weights_digest))


def advance(
    prev: str,
    epoch: int,
    attempt: int,
    step: int,
    contributions: Iterable[tuple[int, int, int, int]],
    reduced: str,
) -> str:
    """The lineage after one more step.

    ``contributions`` are (replica, weight, data shard, batch index); the cursor after is index + 1, so it is
    covered. ``reduced`` is the rank-ordered digest of the reduced gradient shards.
    """
    return digest(prev, epoch, attempt, step, sorted(contributions), reduced)


def newer(a: StateId, b: StateId) -> bool:
    """Whether ``a`` is above ``b``: by (commit_epoch, step), never by step alone."""
    return (a.commit_epoch, a.step) > (b.commit_epoch, b.step)


def same(a: StateId, b: StateId) -> bool:
    """Whether two replicas that report ``a`` and ``b`` hold the same bits."""
    return a == b


SLICES = 16

Digests = tuple[tuple[int, str], ...]  # (replica, digest of its slice), of verified members only


def slice_number(step: int) -> int:
    """The number of the slice that is compared after ``step`` steps."""
    return step % SLICES


def slice_bounds(nbytes: int, step: int) -> tuple[int, int]:
    """The slice that is compared of a state of ``nbytes`` after ``step`` steps, as [begin, end) in bytes.

    Any ``SLICES`` steps in a row cover the whole state.
    """
    n = slice_number(step)
    return nbytes * n // SLICES, nbytes * (n + 1) // SLICES


def differ(digests: Digests) -> bool:
    """Whether the members do not all hold the same."""
    return len({digest for _, digest in digests}) > 1


def minority(digests: Digests) -> tuple[int, ...]:
    """Who holds something else than more than half of the members, sorted; empty if no such half exists."""
    (most, votes), *_ = Counter(digest for _, digest in digests).most_common(1)
    if 2 * votes <= len(digests):
        return ()
    return tuple(sorted(replica for replica, digest in digests if digest != most))


def describe(digests: Digests, state: StateId) -> str:
    """A line for humans: who differs from whom."""
    where = f"in slice {slice_number(state.step)} of {state}"
    few = minority(digests)
    if few:
        rest = sorted(replica for replica, _ in digests if replica not in few)
        return f"replicas {_list(few)} differ {where} from replicas {_list(rest)}, which agree"
    everybody = sorted(replica for replica, _ in digests)
    return f"replicas {_list(everybody)} hold different states {where}; nobody can tell which is right"


def _list(replicas: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, replicas))
