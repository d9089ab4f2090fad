"""What the copies of a job are worth: how often a state is lost, and what that costs.

Failures of hosts are taken as independent, and as rare beside the time until a host is replaced.

A shard is lost if all units that hold it are: hosts, racks or zones. GEMINI (Corollary 1) bounds the probability
that none is; ReStore §IV-D has a formula for groups of equal size without overlaps. Here it is counted, for any
holders: units that hold no shard together are independent, and within the others, the units are decided one after
the other, while only those shards are followed whose holders so far are all lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import comb
from typing import TypeVar

from ft_hsdp.analysis.costs import Assumptions, Reading, effective_ratio, restart_cost, swap_cost, wasted_time
from ft_hsdp.analysis.plan_table import Document
from ft_hsdp.memory.hosts import LEVELS, Host, Level

DAY_S = 86_400.0
MONTH_DAYS = 30.0
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


MOST_LOST = 8
READINGS: tuple[Reading, Reading] = ("wall_clock", "renewal")


def worth(
    holders: Sequence[Sequence[Host]],
    replicas: int,
    assumptions: Assumptions,
    every: int,
    in_memory: tuple[float, float],
    stored: tuple[float, float],
    checkpoint_every: int,
) -> Document:
    """Return what one way of keeping states is worth: `with_copies` or `replicas_alone` of `plan --json`.

    Args:
        holders: the hosts that hold each rank's shard.
        replicas: that go on if one is lost.
        assumptions: rates and times.
        every: steps between two states of which copies are made.
        in_memory: seconds between two such states, and in which a host reads its part of one.
        stored: seconds between two checkpoints, and in which one is written or read.
        checkpoint_every: steps between two checkpoints.
    """
    sets = {frozenset(host.name for host in each) for each in holders}
    hosts = len(frozenset().union(*sets))
    ways = survivable(sets)
    survives = {
        lost: None if ways is None else probability(ways, lost) for lost in range(1, min(MOST_LOST, hosts) + 1)
    }
    per_second = assumptions.host_failures_per_month / MONTH_DAYS / DAY_S  # of one host
    losses = sum(loss_rate(1, len(each), per_second, assumptions.replace_s) for each in sets)
    part = min(1.0, losses / (hosts * per_second)) if per_second else 0.0  # of the failures take a state with them
    lost_s = (1 - part) * swap_cost(assumptions.swap_s, assumptions.step_s, (1 + every) / 2) / replicas
    if part:
        lost_s += part * restart_cost(assumptions.restart_s, assumptions.step_s, checkpoint_every)
    clock, renewal = (
        effective_ratio(1 / (hosts * per_second), lost_s, reading) if per_second else 1.0 for reading in READINGS
    )
    # GEMINI's equation 1: copies are made beside training, so only half an interval and the reading are wasted.
    wasted = wasted_time(0.0, *in_memory) if survives.get(1) == 1 else wasted_time(stored[1], *stored)
    return {
        "lost_hosts": [
            {
                "lost": lost,
                "survives": None if kept is None else float(kept),
                "state_lost": None if kept is None else float(1 - kept),
            }
            for lost, kept in survives.items()
        ],
        "lost_domains": {level: _domains(holders, level) for level in LEVELS[1:]},
        "hosts_until_loss": None if ways is None else expected_losses(ways),  # lost one by one, none replaced
        "losses_per_month": losses * DAY_S * MONTH_DAYS,
        "failure_costs_s": lost_s,  # of the whole job; the other replicas go on
        "wasted_s": wasted,
        "effective_ratio": clock,
        "effective_ratio_renewal": renewal,
    }


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


def _domains(holders: Sequence[Sequence[Host]], level: Level) -> Document:
    """Return how many racks or zones hold all copies of a shard, and how many are known."""
    kept_in = [{host.domain(level) for host in each} for each in holders]
    known = {domain for each in kept_in for domain in each if domain[0] == level}
    return {"fatal": len({next(iter(each)) for each in kept_in if len(each) == 1} & known), "known": len(known)}
