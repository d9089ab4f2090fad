"""What the copies of a job are worth: how often a state is lost, and what that costs.

Failures of hosts are taken as independent, and as rare beside the time until a host is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from ft_hsdp.analysis.costs import Assumptions, Reading, effective_ratio, restart_cost, swap_cost, wasted_time
from ft_hsdp.analysis.plan_table import Document
from ft_hsdp.analysis.survival import expected_losses, probability, survivable
from ft_hsdp.memory.hosts import LEVELS, Host, Level

DAY_S = 86_400.0
MONTH_DAYS = 30.0
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
