"""StateId: which committed step a replica holds, and the chain of hashes that tells histories apart.

FT-HSDP §4.3 calls the replicas with the highest step number healthy. Two replicas can reach one step number
by different commits, so a step number alone hides a divergence. Here a state is named by the epoch that
committed it, its step and a hash chained over everything that was applied.
"""

from __future__ import annotations

import hashlib
import json
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
