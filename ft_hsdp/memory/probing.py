"""Who takes over from a lost holder, while all other holders stay (ReStore §IV-A and §IV-E).

Each shard has a probing sequence: an order of all hosts that anybody can compute. Its holders are the first hosts
of the sequence that live. If one is lost, the next one takes its place, and no other copy moves. The sequence
begins with the holders of the first placement and goes on by double hashing, without the hosts that it has named
before; ReStore's own sequence may name a holder again, and may leave hosts out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count
from math import gcd


def first_holders(shard: int, shards: int, hosts: int, copies: int) -> tuple[int, ...]:
    """Return the holders of a shard when no host is lost: L(x, k) = floor(x p / n) + k p / r, modulo p.

    Args:
        shard: x, the number of the shard.
        shards: n.
        hosts: p.
        copies: r, a divisor of p.

    Raises:
        ValueError: `copies` does not divide `hosts`: then holders overlap less than groups do. `placement.place`
            has groups for any numbers.
    """
    if copies < 1 or hosts % copies:
        raise ValueError(f"{copies} copies on {hosts} hosts: a divisor of {hosts} is needed")
    return tuple((shard * hosts // shards + k * (hosts // copies)) % hosts for k in range(copies))


def double_hashing(start: int, steps: Iterable[int], hosts: int) -> Iterator[int]:
    """Return all hosts once: `start`, then always a step further, modulo `hosts`.

    Args:
        start: the first host.
        steps: candidates for the length of a step; the first that has no divisor in common with `hosts` is taken.
        hosts: number of hosts.

    Raises:
        StopIteration: none of `steps` can be taken.
    """
    step = next(step for step in steps if gcd(step, hosts) == 1)
    return ((start + k * step) % hosts for k in range(hosts))


def probing(shard: int, hosts: int, first: Iterable[int] = ()) -> Iterator[int]:
    """Return all hosts once, in the order in which they are asked to keep a copy of a shard.

    Args:
        shard: the number of the shard.
        hosts: number of hosts; at least 1.
        first: the holders of the first placement, which come before all others.
    """
    named = list(dict.fromkeys(first))
    start = _hash("start", shard) % hosts
    steps = (1 + _hash("step", shard, seed) % max(1, hosts - 1) for seed in count())
    yield from named
    yield from (host for host in double_hashing(start, steps, hosts) if host not in named)


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())
