"""`plan`: which hosts hold which shards, how likely a loss of the state is, and what copies in memory cost.

Nothing is started and no host is asked. Hosts are named as `up` names emulated ones: r0h1 is host 1 of replica 0,
s0 a spare one. What the configuration does not say is assumed; each assumption is an option, and is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING

from ft_hsdp.analysis.costs import Assumptions, option, replicated_ratio, wasted_time
from ft_hsdp.analysis.fewer_ranks import fewer_ranks, tensors
from ft_hsdp.analysis.plan_table import Document, size_of
from ft_hsdp.analysis.reliability import DAY_S, MONTH_DAYS, CopyFigures, Reliability, reliability
from ft_hsdp.errors import ConfigError
from ft_hsdp.memory.copies import SLOTS, MemberHosts, Plan, default_copies, room, unmet
from ft_hsdp.memory.hosts import Host, Level, known, locate

if TYPE_CHECKING:
    from ft_hsdp.config import Config

STATE_BYTES = 12  # of a parameter: fp32 weight and AdamW's two moments
MAX_HOSTS = 16_384  # of all replicas; the exact figures of so many take some seconds
MOST_LOST = 8
BOUNDS = {"_per_month": (1e-9, 1e5), "_gbps": (1e-6, 1e6), "_s": (1e-6, 1e9)}  # of assumptions, by their units
GIGABIT = 1e9 / 8


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
    found = reliability(replicas, [shard] * ranks, wanted, level, assumptions, kept_every, most, every, MOST_LOST)
    network, storage = (gbps * GIGABIT for gbps in (assumptions.network_gbps, assumptions.storage_gbps))
    retrieval = shard * ranks / len(set(replicas[0])) / network
    writing = shard * ranks / storage
    stored = max(kept_every * assumptions.step_s, writing), writing
    if asked is not None and found.plan.unprotected:
        members = [MemberHosts(n, tuple(each), True) for n, each in enumerate(replicas)]
        raise ConfigError("memory.copies", asked, unmet(members, asked, level, most))
    protected, why = _protection(everywhere, level, wanted, found.plan)
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
        "hosts": [*_host_rows(replicas, spares, found)],
        "shards": [*_shard_rows(found)],
        "host_bytes": max(found.host_bytes.values()),
        "copied_bytes_per_step": found.copied_bytes / every,
        "copy_s": _sent(found, shard) / network,
        "with_copies": _figures(found.with_copies, every * assumptions.step_s, retrieval, stored),
        "replicas_alone": _figures(found.without_copies, assumptions.step_s, retrieval, stored),
        "effective_ratio_stalls": _with_stalls(assumptions, replicas),
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
    replicas: Sequence[Sequence[Host]], spares: Iterable[Host], found: Reliability
) -> Iterator[Document]:
    copies: dict[str, list[list[int]]] = {}
    for copy in found.plan.copies:
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
            "copies": copies.get(host.name, []),  # of [replica, rank]
            "bytes": found.host_bytes.get(host.name, 0),
        }


def _shard_rows(found: Reliability) -> Iterator[Document]:
    made = {(copy.rank, copy.holder) for copy in found.plan.copies}
    for rank, hosts in enumerate(found.holders):
        yield {
            "rank": rank,
            "holders": [str(host) for host in hosts if (rank, host) not in made],
            "copies": [str(host) for host in hosts if (rank, host) in made],
        }


def _sent(found: Reliability, shard: int) -> int:
    """Return the bytes of copies that the busiest host takes."""
    taken: dict[str, int] = {}
    for copy in found.plan.copies:
        taken[copy.holder.name] = taken.get(copy.holder.name, 0) + shard
    return max(taken.values(), default=0)


def _figures(figures: CopyFigures, interval: float, retrieval: float, stored: tuple[float, float]) -> Document:
    """Return the figures of one side; all times are in seconds.

    A state of which all copies are made follows after ``interval``; a host reads its part of it in ``retrieval``.
    ``stored`` has the time between two checkpoints, and that in which one is written or read.
    """
    survives = [
        {
            "lost": lost,
            "survives": None if kept is None else float(kept),
            "state_lost": None if kept is None else float(1 - kept),
        }
        for lost, kept in figures.survives.items()
    ]
    # GEMINI's equation 1: copies are made beside training, so only half an interval and the reading are wasted.
    in_memory = figures.survives.get(1) == 1
    wasted = wasted_time(0.0, interval, retrieval) if in_memory else wasted_time(stored[1], *stored)
    return {
        "lost_hosts": survives,
        "lost_domains": {level: {"fatal": n, "known": known} for level, (n, known) in figures.fatal.items()},
        "hosts_until_loss": figures.until_loss,
        "losses_per_month": figures.losses_per_month,
        "failure_costs_s": figures.lost_s,
        "wasted_s": wasted,
        "effective_ratio": figures.ratio,
        "effective_ratio_renewal": figures.renewal,
    }


def _with_stalls(assumptions: Assumptions, replicas: Sequence[Sequence[Host]]) -> float | None:
    """Return the share of the time in which a job of several replicas makes progress (FT-HSDP §6.1); None: of one.

    No state is lost in this model, so it is the same with copies and without. A replica is away until its host
    is replaced, and all replicas stand still for a part of that.
    """
    if len(replicas) < 2:
        return None
    failures = assumptions.host_failures_per_month / MONTH_DAYS / DAY_S * sum(len(set(each)) for each in replicas)
    if not failures:
        return 1.0
    down = max(assumptions.replace_s, assumptions.stall_s)
    return max(0.0, replicated_ratio(1 / failures, down, assumptions.stall_s, len(replicas)))


def parameters(config: Config) -> int:
    """Return the number of parameters of the model, embedding and head included."""
    layers = config.model.layers
    shapes = {name: shape for name, (shape, _) in tensors(config).items()}
    return sum(prod(shape) * (layers if name.startswith("layers.") else 1) for name, shape in shapes.items())
