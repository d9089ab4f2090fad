"""Which hosts keep copies for each other.

GEMINI §4 (Algorithm 1) divides the hosts into groups of `copies` hosts that keep each other's shards. If the
number of hosts is no multiple of `copies`, the remaining hosts join the last group, which is a ring: each host
there keeps the shards of the `copies` - 1 hosts before it.

`copies` counts the owner's own copy.

ReStore §IV-A and §IV-E say who takes over from a lost holder, while all other holders stay. Each shard has a
probing sequence: an order of all hosts that anybody can compute. Its holders are the first hosts of the sequence
that live. If one is lost, the next one takes its place, and no other copy moves. The sequence begins with the
holders of the first placement and goes on by double hashing, without the hosts that it has named before; ReStore's
own sequence may name a holder again, and may leave hosts out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from math import gcd
from typing import Literal, TypeVar

from ft_hsdp.memory.hosts import Host, Level, interleave

Member = TypeVar("Member")
Strategy = Literal["group", "mixed"]


def place(hosts: int, copies: int) -> tuple[list[list[int]], Strategy]:
    """Divide hosts into groups by GEMINI's Algorithm 1.

    Args:
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


def first_holders(shard: int, shards: int, hosts: int, copies: int) -> tuple[int, ...]:
    """Return the holders of a shard when no host is lost: L(x, k) = floor(x p / n) + k p / r, modulo p.

    Args:
        shard: x, the number of the shard.
        hosts: p.
        copies: r, a divisor of p.

    Raises:
        ValueError: `copies` does not divide `hosts`: then holders overlap less than groups do. `place` has
            groups for any numbers.
    """
    if copies < 1 or hosts % copies:
        raise ValueError(f"{copies} copies on {hosts} hosts: a divisor of {hosts} is needed")
    return tuple((shard * hosts // shards + k * (hosts // copies)) % hosts for k in range(copies))


def double_hashing(start: int, steps: Iterable[int], hosts: int) -> Iterator[int]:
    """Return all hosts once: `start`, then always a step further, modulo `hosts`.

    Args:
        start: the first host.
        steps: candidates for the length of a step; the first that has no divisor in common with `hosts` is taken.

    Raises:
        StopIteration: none of `steps` can be taken.
    """
    step = next(step for step in steps if gcd(step, hosts) == 1)
    return ((start + k * step) % hosts for k in range(hosts))


def probing(shard: int, hosts: int, first: Iterable[int] = ()) -> Iterator[int]:
    """Return all hosts once, in the order in which they are asked to keep a copy of a shard.

    Args:
        hosts: number of hosts; at least 1.
        first: the holders of the first placement, which come before all others.
    """
    named = list(dict.fromkeys(first))
    start = mixed("start", shard) % hosts
    steps = (1 + mixed("step", shard, seed) % max(1, hosts - 1) for seed in count())
    yield from named
    yield from (host for host in double_hashing(start, steps, hosts) if host not in named)


def mixed(*parts: object) -> int:
    """Return a number that depends on all of ``parts``, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())
