"""`plan`: which hosts hold which shards, how likely a loss of the state is, and what copies in memory cost.

Nothing is started and no host is asked. Hosts are named as `up` names emulated ones: r0h1 is host 1 of replica 0,
s0 a spare one. What the configuration does not say is assumed; each assumption is an option, and is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from ft_hsdp.config import Config
from ft_hsdp.config.entry import title
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.arguments import ASSUMED, Assumptions, option
from ft_hsdp.memory.copies import MemberHosts, default_copies, unmet
from ft_hsdp.memory.estimates import wasted_time
from ft_hsdp.memory.hosts import Host, locate
from ft_hsdp.memory.reliability import MONTH_DAYS, SLOTS, CopyFigures, HostFailures, Reliability, reliability
from ft_hsdp.state.agent.messages import MAX_COPIES

STATE_BYTES = 12  # of a parameter: fp32 weight and AdamW's two moments
MAX_HOSTS = 16_384  # of all replicas; the exact figures of so many take some seconds
MOST_LOST = 8
SHOWN = 8  # hosts and shards in the table; --json has all
MIB, GIGABIT = 2**20, 1e9 / 8

Document = dict[str, Any]


def plan(
    config: Config,
    assumptions: Assumptions,
    hosts: int | None = None,
    size: float | None = None,
) -> Document:
    """Return the document of `plan --json`.

    Args:
        config: of the job.
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
    room = MAX_COPIES if budget is None else min(MAX_COPIES, int(budget * 1e9 // (SLOTS * shard)))
    if room == 0:
        least = f"{SLOTS * shard / 1e9:.3g} or more: {SLOTS} of a shard of {size_of(shard)}; or null"
        raise ConfigError("memory.budget_gb", budget, least)
    failures = HostFailures(
        per_day=assumptions.host_failures_per_month / MONTH_DAYS,
        replace_s=assumptions.replace_s,
        swap_s=assumptions.swap_s,
        restart_s=assumptions.restart_s,
        step_s=assumptions.step_s,
        checkpoint_every=_between_checkpoints(config),
    )
    found = reliability(replicas, [shard] * ranks, wanted, level, failures, (), room, every, MOST_LOST)
    network, storage = (gbps * GIGABIT for gbps in (assumptions.network_gbps, assumptions.storage_gbps))
    retrieval = shard * ranks / len(set(replicas[0])) / network
    writing = shard * ranks / storage
    stored = max(failures.checkpoint_every * assumptions.step_s, writing), writing
    if asked is not None and found.plan.unprotected:
        members = [MemberHosts(n, tuple(each), True) for n, each in enumerate(replicas)]
        raise ConfigError("memory.copies", asked, unmet(members, asked, level, room))
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
        "protected": wanted > 1 and not found.plan.unprotected,
        "why": found.plan.reason or ("" if wanted > 1 else f"there is one {level} only: no copy can be apart"),
        "hosts": [*_host_rows(replicas, spares, found)],
        "shards": [*_shard_rows(found)],
        "host_bytes": max(found.host_bytes.values()),
        "copied_bytes_per_step": found.copied_bytes / every,
        "copy_s": _sent(found, shard) / network,
        "with_copies": _figures(found.with_copies, every * assumptions.step_s, retrieval, stored),
        "replicas_alone": _figures(found.without_copies, assumptions.step_s, retrieval, stored),
        "assumptions": {**asdict(assumptions), "steps_between_checkpoints": failures.checkpoint_every},
    }


def _check(config: Config, assumptions: Assumptions, hosts: int | None, size: float | None) -> None:
    for name, value in asdict(assumptions).items():
        least = "0 or more" if name == "host_failures_per_month" else "more than 0"
        if not isfinite(value) or value < 0 or (value == 0 and least != "0 or more"):
            raise ConfigError(option(name), value, f"a number, {least}")
    most = MAX_HOSTS // config.replicas
    if hosts is not None and not 1 <= hosts <= most:
        raise ConfigError("--hosts", hosts, f"1 to {most}")
    if size is not None and not 1 <= size <= 1e15:
        raise ConfigError("--parameters", size, "1 to 1e15")
    if size is None and config.entry is not None:
        allowed = f"a number of parameters: {title(config.entry)} makes the model, whose size is not known here"
        raise ConfigError("--parameters", "nothing", allowed)


def _between_checkpoints(config: Config) -> int:
    """Return after how many steps there is another checkpoint. Without any, a lost state costs all steps."""
    return config.checkpoint.every or config.train.steps


def _hosts(config: Config, hosts: int | None) -> tuple[list[list[Host]], list[Host]]:
    """Return the host of each rank of each replica, and the spare hosts."""
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
    """Return the figures of one side.

    Args:
        figures: of that side.
        interval: seconds between two states of which all copies are made.
        retrieval: seconds in which a host reads its part of a state in memory.
        stored: seconds between two checkpoints, and in which one is written or read.
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
        "losses_per_month": figures.losses_per_month,
        "failure_costs_s": figures.lost_s,
        "wasted_s": wasted,
        "effective_ratio": figures.ratio,
        "effective_ratio_renewal": figures.renewal,
    }


def parameters(config: Config) -> int:
    """Return the number of parameters of the model, embedding and head included."""
    from ft_hsdp.train.tokens import VOCABULARY  # numpy is not needed for --help

    model = config.model
    kv = model.dim // model.heads * model.key_value_heads
    block = 2 * model.dim**2 + 2 * model.dim * kv + 3 * model.dim * model.hidden_dim + 2 * model.dim
    return model.layers * block + 2 * VOCABULARY[config.data.tokenizer] * model.dim + model.dim


def lines(document: Document) -> list[str]:
    """Return a document of `plan` as lines of text for people, at most 100 characters wide."""
    replicas, spare = document["replicas"], sum(row["replica"] is None for row in document["hosts"])
    each = (len(document["hosts"]) - spare) // replicas
    spares = f", {_count(spare, 'spare host')}" if spare else ""
    found = [
        f"{document['job']}: {_count(replicas, 'replica')} of {_count(document['ranks_per_replica'], 'rank')} on "
        f"{_count(each, 'host')}{spares}",
        f"state: {document['parameters'] / 1e6:,.1f} M parameters, {size_of(document['state_bytes'])}; "
        f"{size_of(document['shard_bytes'])} a rank",
        f"copies: {document['copies']} of each shard, each on another {document['apart']}, {_often(document)}",
        "protected" if document["protected"] else f"UNPROTECTED: {document['why']}",
        "",
        *_table(["host", "ranks", "copies of", "memory"], [_host_line(row) for row in document["hosts"]]),
        "",
        *_table(
            ["shard", "on", "copied to"],
            [[str(row["rank"]), _names(row["holders"]), _names(row["copies"])] for row in document["shards"]],
        ),
        "",
        *_table(["", "with copies", "replicas alone"], [*_comparison(document)], SHOWN * 4),
        "",
        "assumed:",
    ]
    assumed = document["assumptions"]
    found += [f"  {option(n):<25} {assumed[n]:<6g} {each.metadata['help']}" for n, each in ASSUMED.items()]
    found.append(f"  {'checkpoint.every':<25} {assumed['steps_between_checkpoints']:<6} steps; none: all steps")
    return found


def _comparison(document: Document) -> Iterator[list[str]]:
    sides = document["with_copies"], document["replicas_alone"]
    for kept in zip(*(side["lost_hosts"] for side in sides), strict=True):
        yield [f"survives {_count(kept[0]['lost'], 'lost host')}", *(_share(row["state_lost"]) for row in kept)]
    for level in sides[0]["lost_domains"]:
        both = [side["lost_domains"][level] for side in sides]
        text = [f"{one['fatal']:,} of {one['known']:,}" if one["known"] else "unknown" for one in both]
        yield [f"{level}s whose loss takes a state", *text]
    yield ["states lost per month", *(f"{side['losses_per_month']:.3g}" for side in sides)]
    yield ["a lost host costs (DeadPool)", *(f"{side['failure_costs_s']:,.1f} s" for side in sides)]
    yield ["a lost host wastes (GEMINI)", *(f"{side['wasted_s']:,.1f} s" for side in sides)]
    yield ["effective time, by the clock", *(f"{100 * side['effective_ratio']:.4f} %" for side in sides)]
    yield ["effective time, renewal", *(f"{100 * side['effective_ratio_renewal']:.4f} %" for side in sides)]
    alone = max((SLOTS * len(row["ranks"]) * document["shard_bytes"] for row in document["hosts"]), default=0)
    yield ["memory of the fullest host", size_of(document["host_bytes"]), size_of(alone)]
    yield ["copied per step, all hosts", size_of(document["copied_bytes_per_step"]), size_of(0)]
    yield ["the busiest host receives for", f"{document['copy_s']:.3g} s", "0 s"]


def _often(document: Document) -> str:
    every = document["every"]
    return "of every step" if every == 1 else f"of each {every}th step"


def _host_line(row: Document) -> list[str]:
    ranks = f"r{row['replica']}: {_ranges(row['ranks'])}" if row["replica"] is not None else "spare"
    copied: dict[int, list[int]] = {}
    for replica, rank in row["copies"]:
        copied.setdefault(replica, []).append(rank)
    text = ", ".join(f"r{replica}: {_ranges(ranks)}" for replica, ranks in copied.items()) or "-"
    return [row["host"], ranks, text, size_of(row["bytes"])]


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers in words: 0-3, 7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in found]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:5], f"... ({len(numbers)})"])


def _names(hosts: Sequence[str]) -> str:
    most = 4 if sum(map(len, hosts)) < 40 else 2
    more = f", ... ({len(hosts)})" if len(hosts) > most + 1 else ""
    return ", ".join(hosts[: most if more else most + 1]) + more or "-"


def _table(head: list[str], rows: list[list[str]], shown: int = SHOWN) -> list[str]:
    cut = rows if len(rows) <= shown + 1 else rows[:shown]
    widths = [max(len(row[i]) for row in (head, *cut)) for i in range(len(head))]
    found = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *cut)
    ]
    left = len(rows) - len(cut)
    return [line.rstrip() for line in found] + ([f"... and {left:,} more; --json has all"] if left else [])


def _share(state_lost: float | None) -> str:
    """Return a probability of survival, so that one near 1 is told from 1."""
    if state_lost is None:
        return "not counted"
    if state_lost in (0, 1):
        return "0 %" if state_lost else "100 %"
    return f"{100 * (1 - state_lost):.2f} %" if state_lost > 1e-3 else f"1 - {state_lost:.2g}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_of(size: float) -> str:
    """Return a number of bytes as text."""
    return f"{size / 2**30:,.1f} GiB" if size >= 10 * 2**30 else f"{size / MIB:,.1f} MiB"
