"""What a job's copies are worth: who holds which shard, how often a state is lost, and what that costs.

The figures stand beside those without copies in memory. Failures of hosts are taken as independent, and as rare
beside the time until a host is replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf

from ft_hsdp.analysis.costs import Assumptions, Reading, effective_ratio, restart_cost, swap_cost
from ft_hsdp.analysis.survival import expected_losses, probability, survivable
from ft_hsdp.memory.copies import SLOTS, MemberHosts, Plan, missing_copies
from ft_hsdp.memory.hosts import LEVELS, Host, Level

DAY_S = 86_400.0
MONTH_DAYS = 30.0
READINGS: tuple[Reading, Reading] = ("wall_clock", "renewal")

Holders = tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class CopyFigures:
    """What one way of keeping states is worth."""

    survives: dict[int, Fraction | None]  # by number of hosts lost at once: probability; None: not counted
    until_loss: float | None  # mean number of hosts lost one by one, none replaced, until a state is lost
    losses_per_month: float  # of a state in memory
    lost_s: float  # mean time of the whole job that the failure of one host costs; the other replicas go on
    ratio: float  # of the time in which the job makes progress, by the wall clock (FT-HSDP, GEMINI)
    renewal: float  # the same, if failures count from the end of a recovery (DeadPool)
    fatal: dict[Level, tuple[int, int]]  # racks and zones: those whose loss takes a state with it, and all known


@dataclass(frozen=True, slots=True)
class Reliability:
    holders: tuple[Holders, ...]  # of each rank's shard: the hosts of all replicas, then those that copy it
    plan: Plan  # of the copies
    copied_bytes: int  # of each state of which copies are made, by all hosts together
    host_bytes: dict[str, int]  # in the agents of each host, by its name, in the steady state
    with_copies: CopyFigures
    without_copies: CopyFigures  # replicas alone


def reliability(
    replicas: Sequence[Sequence[Host]],
    shard_bytes: Sequence[int],
    copies: int,
    level: Level,
    assumptions: Assumptions,
    checkpoint_every: int,
    room: int | None = None,
    every: int = 1,
    most_lost: int = 4,
) -> Reliability:
    """Return the figures of a job in which all replicas are healthy.

    Args:
        replicas: the hosts of each replica's ranks.
        shard_bytes: of each rank.
        copies: wanted copies of each shard; see `missing_copies`, as for the next two.
        level: what the hosts of two copies must not share.
        room: shards that a host can keep for others.
        assumptions: rates and times.
        checkpoint_every: steps between two checkpoints; 0: there are none.
        every: steps between two states of which copies are made.
        most_lost: the probability of surviving is given for 1 to so many lost hosts.
    """
    members = [MemberHosts(n, tuple(hosts), True) for n, hosts in enumerate(replicas)]
    plan = missing_copies(members, copies, level, room)
    natural = [tuple(dict.fromkeys(hosts)) for hosts in zip(*replicas, strict=True)]
    holders = [list(hosts) for hosts in natural]
    for copy in plan.copies:
        holders[copy.rank].append(copy.holder)
    about = len(replicas), assumptions, checkpoint_every
    return Reliability(
        holders=tuple(map(tuple, holders)),
        plan=plan,
        copied_bytes=sum(shard_bytes[copy.rank] for copy in plan.copies),
        host_bytes=_host_bytes(replicas, plan, shard_bytes),
        with_copies=_kept(holders, *about, every if plan.copies else 1, most_lost),
        without_copies=_kept(natural, *about, 1, most_lost),
    )


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


def _host_bytes(replicas: Sequence[Sequence[Host]], plan: Plan, shard_bytes: Sequence[int]) -> dict[str, int]:
    kept: Counter[str] = Counter()
    for hosts in replicas:
        for rank, host in enumerate(hosts):
            kept[host.name] += SLOTS * shard_bytes[rank]
    for copy in plan.copies:
        kept[copy.holder.name] += SLOTS * shard_bytes[copy.rank]
    return dict(kept)


def _kept(
    holders: Sequence[Sequence[Host]],
    replicas: int,
    assumptions: Assumptions,
    checkpoint_every: int,
    every: int,
    most_lost: int,
) -> CopyFigures:
    sets = {frozenset(host.name for host in each) for each in holders}
    hosts = len(frozenset().union(*sets))
    ways = survivable(sets)
    survives = {
        lost: None if ways is None else probability(ways, lost) for lost in range(1, min(most_lost, hosts) + 1)
    }
    per_second = assumptions.host_failures_per_month / MONTH_DAYS / DAY_S  # of one host
    losses = sum(loss_rate(1, len(each), per_second, assumptions.replace_s) for each in sets)
    part = min(1.0, losses / (hosts * per_second)) if per_second else 0.0  # of the failures take a state with them
    lost_s = (1 - part) * swap_cost(assumptions.swap_s, assumptions.step_s, (1 + every) / 2) / replicas
    if part:
        again_s = restart_cost(assumptions.restart_s, assumptions.step_s, checkpoint_every)
        lost_s += part * again_s if checkpoint_every else inf
    clock, renewal = (
        effective_ratio(1 / (hosts * per_second), lost_s, reading) if per_second else 1.0 for reading in READINGS
    )
    fatal: dict[Level, tuple[int, int]] = {level: _fatal(holders, level) for level in LEVELS[1:]}
    until_loss = None if ways is None else expected_losses(ways)
    return CopyFigures(survives, until_loss, losses * DAY_S * MONTH_DAYS, lost_s, clock, renewal, fatal)


def _fatal(holders: Sequence[Sequence[Host]], level: Level) -> tuple[int, int]:
    """Return how many racks or zones hold all copies of a shard, and how many are known."""
    kept_in = [{host.domain(level) for host in each} for each in holders]
    known = {domain for each in kept_in for domain in each if domain[0] == level}
    return len({next(iter(each)) for each in kept_in if len(each) == 1} & known), len(known)
