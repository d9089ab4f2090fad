"""`plan`: which hosts hold which shards, how likely a loss of the state is, and what copies in memory cost.

Nothing is started and no host is asked. Hosts are named as `up` names emulated ones: r0h1 is host 1 of replica 0,
s0 a spare one. What the configuration does not say is assumed; each assumption is an option, and is printed.

`fewer_ranks` is what `plan` says of `memory.shrink_to`: fewer ranks after the loss of a host, beside the wait for
another one. One replica, the first, has lost hosts; all others are whole. Rates come from the rule by which the
lighthouse shares out units (`core.units`), so `quorum.batch: constant` counts with its whole micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from ft_hsdp.analysis.costs import Assumptions, HostAway, option, replicated_ratio
from ft_hsdp.analysis.plan_table import Document, size_of
from ft_hsdp.analysis.reliability import DAY_S, MONTH_DAYS, worth
from ft_hsdp.core.units import UnitPolicy
from ft_hsdp.errors import ConfigError
from ft_hsdp.memory.copies import SLOTS, MemberHosts, Plan, coverage, default_copies, missing_copies, room, unmet
from ft_hsdp.memory.hosts import Host, Level, known, locate
from ft_hsdp.memory.lanes import Tensors, without_rows

if TYPE_CHECKING:
    from ft_hsdp.config import Config


AWAY_S = (60.0, 600.0, 3_600.0, 86_400.0)  # for which the units lost are given, besides the break-even time


def fewer_ranks(
    config: Config, assumptions: Assumptions, replicas: Sequence[Sequence[Host]], state_bytes: int
) -> Document | None:
    """Return the part `fewer_ranks` of the document of `plan --json`; None without `memory.shrink_to`.

    Args:
        assumptions: `swap_s` is the time of a start, with fewer and with all ranks; `step_s` that of a step.
        replicas: the host of each rank of each replica.
    """
    least = config.memory.shrink_to
    if least is None:
        return None
    ranks, hosts = len(replicas[0]), len(set(replicas[0]))
    each = ranks // hosts
    rest = [ranks] * (len(replicas) - 1)
    full, without = (_rate(config, assumptions, ranks, widths) for widths in ([ranks, *rest], rest))
    widths = [w for w in range(ranks - each, 0, -each) if w >= least]
    rows = [*_rows(config, assumptions, replicas, state_bytes, widths)]
    away: list[Document] = []
    break_even = None
    if rows:
        narrow = rows[0]["units_per_s"]
        model = HostAway(full[0], without[0], narrow, config.timeouts.place_s, assumptions.swap_s)
        break_even = model.break_even
        times = sorted({*AWAY_S, assumptions.replace_s, *([break_even] if break_even else [])})
        away = [
            {
                "away_s": time,
                "units_lost_waiting": model.lost_waiting(time),
                "units_lost_shrinking": model.lost_shrinking(time),
            }
            for time in times
        ]
    return {
        "shrink_to": least,
        "place_s": config.timeouts.place_s,
        "units_per_s": full[0],
        "units_per_s_without": without[0],
        "break_even_s": break_even,
        "away": away,
        "widths": rows,
    }


def tensors(config: Config) -> Tensors:
    """Return the parameters of the built-in model that differ in shape, by name: one block, the first."""
    model = config.model
    dim, ffn, vocabulary = model.dim, model.hidden_dim, config.data.vocabulary
    kv = dim // model.heads * model.key_value_heads
    shapes = {
        "embed.weight": (vocabulary, dim),
        "layers.0.attention_norm.weight": (dim,),
        "layers.0.attention.query.weight": (dim, dim),
        "layers.0.attention.key.weight": (kv, dim),
        "layers.0.attention.value.weight": (kv, dim),
        "layers.0.attention.out.weight": (dim, dim),
        "layers.0.ffn_norm.weight": (dim,),
        "layers.0.ffn.gate.weight": (ffn, dim),
        "layers.0.ffn.up.weight": (ffn, dim),
        "layers.0.ffn.down.weight": (dim, ffn),
        "output.norm.weight": (dim,),
        "output.head.weight": (vocabulary, dim),
    }
    return {name: (shape, 4) for name, shape in shapes.items()}


def _rows(
    config: Config,
    assumptions: Assumptions,
    replicas: Sequence[Sequence[Host]],
    state_bytes: int,
    widths: Sequence[int],
) -> Iterator[Document]:
    ranks = len(replicas[0])
    rest = [ranks] * (len(replicas) - 1)
    level = config.memory.apart
    for width in widths:
        rate, units, step_s = _rate(config, assumptions, ranks, [width, *rest])
        narrow = replicas[0][:width]
        members = [MemberHosts(n, tuple(hosts), True) for n, hosts in enumerate([narrow, *replicas[1:]])]
        shard = -(-state_bytes // max(width, *rest)) if rest else -(-state_bytes // width)  # that copies are of
        asked = config.memory.copies
        alive = [host for member in members for host in member.hosts]
        wanted = default_copies(alive, level) if asked is None else asked
        made = missing_copies(members, wanted, level, room(config.memory.budget_gb, shard))
        held = coverage(members, made, level)
        protected = held > 1 and not made.unprotected
        of_hosts = {host.name: SLOTS * -(-state_bytes // width) * narrow.count(host) for host in narrow}
        for copy in made.copies:
            if copy.holder.name in of_hosts:
                of_hosts[copy.holder.name] += SLOTS * shard
        yield {
            "ranks": width,
            "hosts": len(set(narrow)),
            "units_per_s": rate,
            "units_per_step": units,
            "step_s": step_s,
            "rank_bytes": -(-state_bytes // width),
            "host_bytes": max(of_hosts.values()),
            "copies": held,
            "protected": None if protected and not known(alive, level) else protected,
            "copied_bytes_per_step": shard * len(made.copies) / config.memory.every,
            # Several replicas refuse a model with any; it is not known here what an entry makes.
            "without_rows": None if config.entry is not None else len(without_rows(tensors(config), width)),
        }


def _rate(config: Config, assumptions: Assumptions, ranks: int, widths: Sequence[int]) -> tuple[float, int, float]:
    """Return units per second, units of a step, and seconds of a step, of contributors of these widths."""
    accumulate = config.train.accumulate
    wanted = config.replicas * accumulate * ranks
    allowed = tuple(sorted(n for n in set(config.quorum.allowed) if n >= config.quorum.min_replicas))
    policy = UnitPolicy(
        replicas=config.replicas,
        accumulate=accumulate,
        batch=config.quorum.batch,
        allowed=allowed,
        max_accumulate=config.quorum.max_accumulate or wanted,
        data_ranks=ranks,
    )
    able = len(widths) if len(widths) >= config.quorum.min_replicas else 0
    taking = widths[: policy.contributors(able)]
    shares = policy.shares(taking)
    if not shares:
        return 0.0, 0, assumptions.step_s
    most = max(units // width for units, width in zip(shares, taking, strict=True))
    step_s = assumptions.step_s * most / accumulate
    return sum(shares) / step_s, sum(shares), step_s


STATE_BYTES = 12  # of a parameter: fp32 weight and AdamW's two moments
MAX_HOSTS = 16_384  # of all replicas; the exact figures of so many take some seconds
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
            "bytes": SLOTS * shard * (len(ranks) + len(kept)),
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
