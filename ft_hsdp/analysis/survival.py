"""The exact probability that no shard is lost with k units: hosts, racks or zones.

A shard is lost if all units that hold it are. GEMINI (Corollary 1) bounds the probability that none is; ReStore
§IV-D has a formula for groups of equal size without overlaps. Here it is counted, for any holders: units that hold
no shard together are independent, and within the others, the units are decided one after the other, while only
those shards are followed whose holders so far are all lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import comb
from typing import TypeVar

Unit = TypeVar("Unit", bound=Hashable)

MAX_CASES = 1 << 16  # that are followed at once; more is not worth the wait


def survivable(holders: Iterable[frozenset[Unit]]) -> tuple[int, ...] | None:
    """Return for each number of lost units in how many ways they can be lost without the loss of a shard.

    Args:
        holders: the units that hold each shard. Their union is what can be lost.

    Returns:
        The ways for 0, 1, ... lost units; None if the holders overlap in so many ways that counting takes too
        long.
    """
    counts: dict[tuple[tuple[int, ...], ...], int] = {}
    for component in _components({frozenset(each) for each in holders}):
        order = {unit: i for i, unit in enumerate(dict.fromkeys(unit for each in component for unit in each))}
        shape = tuple(sorted(tuple(sorted(order[unit] for unit in each)) for each in component))
        counts[shape] = counts.get(shape, 0) + 1
    ways = [1]
    for shape, count in counts.items():
        each = _ways(shape)
        if each is None:
            return None
        ways = _product(ways, _power(each, count))
    return tuple(ways)


def probability(ways: Sequence[int], lost: int) -> Fraction:
    """Return the probability that no shard is lost with `lost` units, lost at once and at random.

    Args:
        ways: from `survivable`.
        lost: number of lost units.

    Raises:
        ValueError: there are not so many units.
    """
    units = len(ways) - 1
    if not 0 <= lost <= units:
        raise ValueError(f"{lost} lost units of {units}")
    return Fraction(ways[lost], comb(units, lost))


def expected_losses(ways: Sequence[int]) -> float:
    """Return the mean number of units lost one by one, without repair, until a shard is lost (ReStore §IV-D)."""
    units, all_ways, mean = len(ways) - 1, 1, 0.0
    for lost, kept in enumerate(ways):
        if not kept:
            break
        mean += kept / all_ways
        all_ways = all_ways * (units - lost) // (lost + 1)  # the binomial coefficient of the next term
    return mean


def _components(holders: Iterable[frozenset[Unit]]) -> list[list[list[Unit]]]:
    """Divide shards into those that share units, directly or through others. Units keep one order."""
    leader: dict[Unit, Unit] = {}

    def root(unit: Unit) -> Unit:
        while leader[unit] != unit:
            leader[unit] = leader[leader[unit]]
            unit = leader[unit]
        return unit

    ordered = sorted((sorted(each, key=repr) for each in holders), key=repr)
    for each in ordered:
        for unit in each:
            leader.setdefault(unit, unit)
            leader[root(unit)] = root(each[0])
    parts: dict[Unit, list[list[Unit]]] = {}
    for each in ordered:
        parts.setdefault(root(each[0]), []).append(each)
    return list(parts.values())


@lru_cache(maxsize=256)
def _ways(shards: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
    """Return `survivable` of one component, whose units are numbered.

    A case is the set of shards whose units so far are all lost, as a bit mask; its value, the ways to come there
    by number of lost units.
    """
    units = 1 + max(max(each) for each in shards)
    with_unit = [sum(1 << s for s, each in enumerate(shards) if unit in each) for unit in range(units)]
    begins = [sum(1 << s for s, each in enumerate(shards) if min(each) == unit) for unit in range(units)]
    ends = [sum(1 << s for s, each in enumerate(shards) if max(each) == unit) for unit in range(units)]
    cases: dict[int, list[int]] = {0: [1]}
    for unit in range(units):
        following: dict[int, list[int]] = {}
        for followed, ways in cases.items():
            _add(following, followed & ~with_unit[unit], ways)
            lost = followed | begins[unit]
            if not lost & ends[unit]:
                _add(following, lost, [0, *ways])
        cases = following
        if len(cases) > MAX_CASES:
            return None
    (total,) = cases.values()  # no shard is followed beyond its last unit
    return (*total, *[0] * (units + 1 - len(total)))


def _add(cases: dict[int, list[int]], case: int, ways: Sequence[int]) -> None:
    known = cases.setdefault(case, [])
    known.extend([0] * (len(ways) - len(known)))
    for lost, count in enumerate(ways):
        known[lost] += count


def _product(a: Sequence[int], b: Sequence[int]) -> list[int]:
    product = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    return product


def _power(base: Sequence[int], exponent: int) -> list[int]:
    """Return a power of a polynomial whose first coefficient is 1.

    The recurrence takes as many products as the result has coefficients, times the degree of `base`: the exact
    figures of 4,096 hosts take milliseconds.
    """
    power = [1]
    for k in range(1, (len(base) - 1) * exponent + 1):
        terms = ((exponent * i - k + i) * base[i] * power[k - i] for i in range(1, min(len(base) - 1, k) + 1))
        power.append(sum(terms) // k)
    return power
