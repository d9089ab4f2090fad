"""`plan`: which hosts hold which shards, how likely a loss of the state is, and what copies in memory cost.

Nothing is started and no host is asked. Hosts are named as `up` names emulated ones: r0h1 is host 1 of replica 0,
s0 a spare one. What the configuration does not say is assumed; each assumption is an option, and is printed.
Failures of hosts are taken as independent, and as rare beside the time until a host is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from ft_hsdp.analysis.costs import (
    Assumptions,
    Reading,
    effective_ratio,
    option,
    restart_cost,
    swap_cost,
    wasted_time,
)
from ft_hsdp.analysis.fewer_ranks import fewer_ranks, tensors
from ft_hsdp.analysis.plan_table import Document, size_of
from ft_hsdp.analysis.survival import expected_losses, probability, survivable
from ft_hsdp.errors import ConfigError
from ft_hsdp.memory.copies import OWN_SLOTS, SLOTS, MemberHosts, Plan, default_copies, missing_copies, room, unmet
from ft_hsdp.memory.hosts import LEVELS, Host, Level, known, locate

if TYPE_CHECKING:
    from ft_hsdp.config import Config

STATE_BYTES = 12  # of a parameter: fp32 weight and AdamW's two moments
MAX_HOSTS = 16_384  # of all replicas; the exact figures of so many take some seconds
BOUNDS = {"_per_month": (1e-9, 1e5), "_gbps": (1e-6, 1e6), "_s": (1e-6, 1e9)}  # of assumptions, by their units
GIGABIT = 1e9 / 8
DAY_S = 86_400.0
MONTH_DAYS = 30.0
MOST_LOST = 8
READINGS: tuple[Reading, Reading] = ("wall_clock", "renewal")


def plan(
    config: Config,
    assumptions: Assumptions,
    hosts: int | None = None,
    size: float | None = None,
) -> Document:
    """Return the document of `plan --json`.

    Args:
        assumptions: what it does not say.
        hosts: of each replica, in place of `hosts.per_replica`. If there are more than ranks, each has one rank:
            an estimate of a larger job.
        size: parameters of the model, in place of what the configuration says.

    Returns:
        JSON values only. What has no bound is None.

    Raises:
        ConfigError: an option or a key cannot be used.
    """
    _check(config, assumptions, hosts, size)
    replicas, spares = _hosts(config, hosts)
    ranks = len(replicas[0])
    count = parameters(config) if size is None else size
    shard = -int(-STATE_BYTES * count // ranks)
    level, every = config.memory.apart, config.memory.every
    everywhere = [host for replica in replicas for host in replica]
    asked = config.memory.copies
    wanted = default_copies(everywhere, level) if asked is None else asked
    budget = config.memory.budget_gb
    most = room(budget, shard)
    if most == 0:
        least = f"{SLOTS * shard / 1e9:.3g} or more: {SLOTS} of a shard of {size_of(shard)}; or null"
        raise ConfigError("memory.budget_gb", budget, least)
    kept_every = config.checkpoint.every or config.train.steps  # without checkpoints, a lost state costs all steps
    members = [MemberHosts(n, tuple(each), True) for n, each in enumerate(replicas)]
    made = missing_copies(members, wanted, level, most)
    if asked is not None and made.unprotected:
        raise ConfigError("memory.copies", asked, unmet(members, asked, level, most))
    network, storage = (gbps * GIGABIT for gbps in (assumptions.network_gbps, assumptions.storage_gbps))
    retrieval = shard * ranks / len(set(replicas[0])) / network
    writing = shard * ranks / storage
    stored = max(kept_every * assumptions.step_s, writing), writing
    alone = [tuple(dict.fromkeys(hosts)) for hosts in zip(*replicas, strict=True)]  # the holders of each shard
    copied: list[list[Host]] = [[] for _ in alone]
    for copy in made.copies:
        copied[copy.rank].append(copy.holder)
    held = [(*hosts, *copies) for hosts, copies in zip(alone, copied, strict=True)]
    figures = partial(worth, stored=stored, checkpoint_every=kept_every)
    step_s, steps = assumptions.step_s, every if made.copies else 1
    protected, why = _protection(everywhere, level, wanted, made)
    rows = [*_host_rows(replicas, spares, made, shard)]
    return {
        "job": config.job.name,
        "replicas": len(replicas),
        "ranks_per_replica": ranks,
        "parameters": int(count),
        "state_bytes": shard * ranks,
        "shard_bytes": shard,
        "copies": wanted,
        "apart": level,
        "every": every,
        "protected": protected,
        "why": why,
        "hosts": rows,
        "shards": [
            {"rank": rank, "holders": [*map(str, hosts)], "copies": [*map(str, copied[rank])]}
            for rank, hosts in enumerate(alone)
        ],
        "host_bytes": max(row["bytes"] for row in rows),
        "copied_bytes_per_step": shard * len(made.copies) / every,
        "copy_s": max(len(row["copies"]) for row in rows) * shard / network,
        "with_copies": figures(held, len(replicas), assumptions, steps, (every * step_s, retrieval)),
        "replicas_alone": figures(alone, len(replicas), assumptions, 1, (step_s, retrieval)),
        "fewer_ranks": fewer_ranks(config, assumptions, replicas, shard * ranks),
        "assumptions": {**asdict(assumptions), "steps_between_checkpoints": kept_every},
    }


def _protection(hosts: Sequence[Host], level: Level, copies: int, plan: Plan) -> tuple[bool | None, str]:
    """Return whether a lost domain takes no state with it, and why not; None: no such domain is known."""
    if copies < 2:
        apart = len({host.domain(level) for host in hosts}) > 1
        return False, "memory.copies is 1" if apart else f"there is one {level} only: no copy can be apart"
    if plan.unprotected:
        return False, plan.reason
    if not known(hosts, level):
        return None, f"no {level} is known (hosts.labels): each host counts as one of its own"
    return True, ""


def _check(config: Config, assumptions: Assumptions, hosts: int | None, size: float | None) -> None:
    for name, value in asdict(assumptions).items():
        least, most = next(bounds for unit, bounds in BOUNDS.items() if name.endswith(unit))
        never = name == "host_failures_per_month"
        if not (least <= value <= most or (never and value == 0)):
            raise ConfigError(option(name), value, f"{'0, or ' * never}{least:g} to {most:g}")
    most_hosts = MAX_HOSTS // config.replicas
    if hosts is not None and not 1 <= hosts <= most_hosts:
        raise ConfigError("--hosts", hosts, f"1 to {most_hosts}")
    if size is not None and not 1 <= size <= 1e15:
        raise ConfigError("--parameters", size, "1 to 1e15")
    if size is None and config.entry is not None:
        allowed = f"a number of parameters: {config.entry} makes the model, whose size is not known here"
        raise ConfigError("--parameters", "nothing", allowed)


def _hosts(config: Config, hosts: int | None) -> tuple[list[list[Host]], list[Host]]:
    count = hosts or config.hosts.per_replica or 1
    ranks = max(config.ranks_per_replica, count)
    if ranks % count:
        raise ConfigError("--hosts", hosts, f"a divisor of ranks_per_replica ({ranks}), or more than that")
    placed = [[_host(config, f"r{n}h{i}") for i in range(count)] for n in range(config.replicas)]
    replicas = [[host for host in each for _ in range(ranks // count)] for each in placed]
    return replicas, [_host(config, f"s{i}") for i in range(config.hosts.spare)]


def _host(config: Config, name: str) -> Host:
    return locate(name, config.hosts.labels, {})[0]


def _host_rows(
    replicas: Sequence[Sequence[Host]], spares: Iterable[Host], made: Plan, shard: int
) -> Iterator[Document]:
    copies: dict[str, list[list[int]]] = {}
    for copy in made.copies:
        copies.setdefault(copy.holder.name, []).append([copy.replica, copy.rank])
    placed: dict[Host, tuple[int | None, list[int]]] = {}
    for replica, hosts in enumerate(replicas):
        for rank, host in enumerate(hosts):
            placed.setdefault(host, (replica, []))[1].append(rank)
    placed |= {host: (None, []) for host in spares}
    for host, (where, ranks) in placed.items():
        yield {
            "host": str(host),
            "replica": where,
            "ranks": ranks,
            "copies": (kept := copies.get(host.name, [])),  # of [replica, rank]
            "bytes": shard * ((OWN_SLOTS if made.copies else SLOTS) * len(ranks) + SLOTS * len(kept)),
        }


def parameters(config: Config) -> int:
    """Return the number of parameters of the model, embedding and head included."""
    layers = config.model.layers
    shapes = {name: shape for name, (shape, _) in tensors(config).items()}
    return sum(prod(shape) * (layers if name.startswith("layers.") else 1) for name, shape in shapes.items())


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
