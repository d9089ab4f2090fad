"""Which hosts keep copies for each other, and what a loss of k hosts costs.

GEMINI §4 (Algorithm 1) divides the hosts into groups of `copies` hosts that keep each other's shards. If the
number of hosts is no multiple of `copies`, the remaining hosts join the last group, which is a ring: each host
there keeps the shards of the `copies` - 1 hosts before it.

`copies` counts the owner's own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, comb
from typing import Literal, TypeVar

from ft_hsdp.memory.hosts import Host, Level, interleave
from ft_hsdp.memory.survival import probability, survivable

Member = TypeVar("Member")
Strategy = Literal["group", "mixed"]


def place(hosts: int, copies: int) -> tuple[list[list[int]], Strategy]:
    """Divide hosts into groups by GEMINI's Algorithm 1.

    Args:
        hosts: number of hosts.
        copies: copies of each shard, the owner's own one included.

    Returns:
        The indices of the hosts of each group, and "group" if all groups have `copies` members, else "mixed": the
        last group is a ring.

    Raises:
        ValueError: there are fewer hosts than copies, or no copies.
    """
    if not 1 <= copies <= hosts:
        raise ValueError(f"{copies} copies on {hosts} hosts: 1 to {hosts} are possible")
    count = hosts // copies
    groups = [list(range(i * copies, (i + 1) * copies)) for i in range(count)]
    groups[-1] += range(count * copies, hosts)
    return groups, "mixed" if hosts % copies else "group"


def groups(hosts: Sequence[Host], copies: int, level: Level) -> list[list[Host]]:
    """Divide hosts into groups whose members stand in different domains, as far as that is possible.

    The hosts are taken in the order of `interleave`. If domains of different sizes spoil that order, they are
    dealt out to the groups one domain after the other, the largest first.

    Args:
        hosts: the hosts, in an order that all ranks agree on.
        copies: copies of each shard, the owner's own one included.
        level: what the members of a group must not share.

    Returns:
        The hosts of each group, in the order in which each keeps copies of the ones before it.

    Raises:
        ValueError: there are fewer hosts than copies, or no copies.
    """
    indices, _ = place(len(hosts), copies)
    order = interleave(hosts, level)
    divided = [[order[i] for i in group] for group in indices]
    if not _shared(divided, level):
        return divided
    by_domain: dict[tuple[str, ...], list[Host]] = {}
    for host in hosts:
        by_domain.setdefault(host.domain(level), []).append(host)
    sorted_domains = sorted(by_domain.values(), key=len, reverse=True)
    dealt: list[list[Host]] = [[] for _ in indices]
    for i, host in enumerate(host for domain in sorted_domains for host in domain):
        dealt[i % len(dealt)].append(host)
    # A group may have one member more than others here, not all that remain: a ring of copies + 1 members.
    return min(divided, dealt, key=lambda each: _shared(each, level))


def holders(group: Sequence[Member], owner: Member, copies: int) -> list[Member]:
    """Return who keeps the copies of a host's shards: the next `copies` - 1 members of its group, in order.

    Raises:
        ValueError: `owner` is not in the group.
    """
    at = group.index(owner)
    return [group[(at + k) % len(group)] for k in range(1, copies)]


def _shared(divided: list[list[Host]], level: Level) -> int:
    """Return how many hosts share a domain with another member of their group."""
    return sum(len(group) - len({host.domain(level) for host in group}) for group in divided)


def survives(hosts: int, copies: int, lost: int) -> Fraction:
    """Return the exact probability that no shard is lost with `lost` hosts, which are lost at once and at random.

    Raises:
        ValueError: `place` has no groups for these numbers, or `lost` is negative or above `hosts`.
    """
    ways = survivable(holder_sets(hosts, copies))
    assert ways is not None  # groups are small
    return probability(ways, lost)


def holder_sets(hosts: int, copies: int) -> list[frozenset[int]]:
    """Return the hosts that hold the shards of each host, itself included.

    Raises:
        ValueError: `place` has no groups for these numbers.
    """
    divided, _ = place(hosts, copies)
    return [frozenset((owner, *holders(group, owner, copies))) for group in divided for owner in group]


def union_bound(hosts: int, copies: int, lost: int) -> Fraction:
    """Return GEMINI's lower bound of `survives` (Corollary 1), exact for fewer than 2 * `copies` lost hosts."""
    if lost < copies:
        return Fraction(1)
    return max(Fraction(0), 1 - Fraction(hosts * comb(hosts - copies, lost - copies), copies * comb(hosts, lost)))


def best_possible(hosts: int, copies: int) -> Fraction:
    """Return the largest probability of any placement to survive `copies` lost hosts (GEMINI, Theorem 1)."""
    return 1 - Fraction(ceil(hosts / copies), comb(hosts, copies))


def loss_rate(groups: int, copies: int, failures: float, repair: float) -> float:
    """Return how often a shard is lost, per unit of time, if failures are independent and rare.

    Each of `groups` sets of `copies` members loses its last member while all others are being replaced.

    Args:
        groups: number of sets. A shard of N replicas of H hosts: H sets of N hosts.
        copies: members of a set.
        failures: losses of one member per unit of time.
        repair: units of time until a lost member is replaced and has its copies again. Where failures are not rare
            beside that, each of the others counts as being replaced always.
    """
    replaced = min(1.0, failures * repair)  # the probability that another member is being replaced
    return groups * copies * failures * replaced ** (copies - 1)
