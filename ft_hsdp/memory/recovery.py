"""The newest state that can be put together from the memory of all hosts.

A state can be restored if every shard of it is complete in some agent: the rank's own one, one that keeps a copy,
or one of another replica, also if the ranks of that replica are dead. GEMINI §6 restores a machine from its group,
and falls to the checkpoint with the first group that is lost. Here the replicas are further groups, so that a lost
host in each replica costs nothing as long as they held different shards.

Shards of one state may come from several replicas, because a snapshot is only made of a committed state and a
state has one content. Shards of two states are never combined.

The caller fetches and verifies. If a source fails, the caller puts it into `excluded` and calls `newest` again:
the next source of the same state is used, then an older state, and with None the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.hosts import Host

Rung = Literal["agent", "copy", "replica", "checkpoint", "initial"]
RUNGS: tuple[Rung, ...] = get_args(Rung)  # the best one first


@dataclass(frozen=True, slots=True)
class Holding:
    """One complete snapshot in the memory of one agent."""

    state: StateId
    replica: int  # whose shard it is
    rank: int  # of that replica
    ranks: int  # its width
    layout: str  # fingerprint of the shard's tensors
    host: str  # path of the agent's host
    address: str  # "host:port" at which the agent serves it
    settled: bool  # all ranks of its replica have a snapshot of this state


@dataclass(frozen=True, slots=True)
class Recoverable:
    """A state, and where each rank takes its shard from."""

    state: StateId
    sources: tuple[tuple[Holding, ...], ...]  # of each rank, nearest first; none is empty


def newest(
    holdings: Iterable[Holding],
    replica: int,
    layouts: Sequence[str],
    hosts: Sequence[str],
    excluded: Collection[Holding] = (),
) -> Recoverable | None:
    """Return the newest state of which every shard is complete in some agent, or None if there is no such state.

    Args:
        holdings: what all agents that answered hold.
        replica: the replica that recovers.
        layouts: the layout of the shard of each of its ranks. Other layouts and widths are left out.
        hosts: the path of the host of each of its ranks.
        excluded: holdings that failed a check.
    """
    found: dict[StateId, list[list[Holding]]] = {}
    for holding in dict.fromkeys(holdings):
        if holding.ranks != len(layouts) or not 0 <= holding.rank < holding.ranks or holding in excluded:
            continue
        if holding.layout == layouts[holding.rank]:
            found.setdefault(holding.state, [[] for _ in layouts])[holding.rank].append(holding)
    whole = [state for state, shards in found.items() if all(shards)]
    if not whole:
        return None
    # Two states of one epoch and step exist only if memory was corrupted; the name decides the same way
    # everywhere.
    state = max(whole, key=lambda each: (each.commit_epoch, each.step, each.lineage))
    sources = (
        tuple(sorted(shards, key=lambda holding: _distance(holding, replica, host)))
        for shards, host in zip(found[state], hosts, strict=True)
    )
    return Recoverable(state, tuple(sources))


def rung(used: Iterable[Holding], replica: int, hosts: Sequence[str]) -> Rung:
    """Return what a replica had to use: "agent" if each shard was on its own host, else the farthest source.

    Args:
        used: the source of each rank.
        replica: the replica that recovers.
        hosts: the path of the host of each of its ranks.
    """
    worst = 0
    for holding in used:
        if holding.replica != replica:
            worst = max(worst, RUNGS.index("replica"))
        elif holding.host != hosts[holding.rank]:
            worst = max(worst, RUNGS.index("copy"))
    return RUNGS[worst]


def _distance(holding: Holding, replica: int, host: str) -> tuple[object, ...]:
    """Return a key that sorts sources: the own host, the own replica, the own rack, the own zone, the others."""
    far = Host.parse(host).distance(Host.parse(holding.host))
    return far > 0, holding.replica != replica, far, holding.host, holding.address
