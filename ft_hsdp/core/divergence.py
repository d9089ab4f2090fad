"""Divergence: whether replicas that call their states by one name hold the same bits, and who is wrong if not.

With its vote on a step every rank gives a digest of one slice of the state that it holds, another one at each
step, so that all of it is compared within ``SLICES`` steps. FT-HSDP leaves silent corruption of a replica's
state to its operator; DeadPool assumes that there is none.
"""

from __future__ import annotations

from collections import Counter

from ft_hsdp.core.lineage import StateId

SLICES = 16

Digests = tuple[tuple[int, str], ...]  # (replica, digest of its slice), of verified members only


def number(step: int) -> int:
    """The number of the slice that is compared after ``step`` steps."""
    return step % SLICES


def part(nbytes: int, step: int) -> tuple[int, int]:
    """The slice that is compared of a state of ``nbytes`` after ``step`` steps, as [begin, end) in bytes.

    Any ``SLICES`` steps in a row cover the whole state.
    """
    n = number(step)
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
    where = f"in slice {number(state.step)} of {state}"
    few = minority(digests)
    if few:
        rest = sorted(replica for replica, _ in digests if replica not in few)
        return f"replicas {_list(few)} differ {where} from replicas {_list(rest)}, which agree"
    everybody = sorted(replica for replica, _ in digests)
    return f"replicas {_list(everybody)} hold different states {where}; nobody can tell which is right"


def _list(replicas: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, replicas))
