"""What `plan` says of `memory.shrink_to`: fewer ranks after the loss of a host, beside the wait for another one.

One replica, the first, has lost hosts; all others are whole. Rates come from the rule by which the lighthouse
shares out units (`core.units`), so `quorum.batch: constant` counts with its whole micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ft_hsdp.analysis.costs import Assumptions, HostAway
from ft_hsdp.analysis.plan_table import Document
from ft_hsdp.core.units import UnitPolicy
from ft_hsdp.memory.copies import OWN_SLOTS, SLOTS, MemberHosts, coverage, default_copies, missing_copies, room
from ft_hsdp.memory.hosts import Host, known
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
        own = (OWN_SLOTS if made.copies else SLOTS) * -(-state_bytes // width)
        of_hosts = {host.name: own * narrow.count(host) for host in narrow}
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
