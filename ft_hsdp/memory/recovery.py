"""The newest state that can be put together from the memory of all hosts.

A state can be restored if every shard of it is complete in some agent: the rank's own one, one that keeps a copy,
or one of another replica, also if the ranks of that replica are dead. GEMINI §6 restores a machine from its group,
and falls to the checkpoint with the first group that is lost. Here the replicas are further groups, so that a lost
host in each replica costs nothing as long as they held different shards.

Shards of one state may come from several replicas, because a snapshot is only made of a committed state and a
state has one content. Shards of two states are never combined.

The shards may be those of another number of ranks: then each rank needs parts of several (`shape`).

The caller fetches and verifies. If a source fails, the caller puts it into `excluded` and calls `newest` again:
the next source of the same state is used, then an older state, and with None the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal, get_args

from ft_hsdp.core import state_id
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
    # Of each rank, nearest first; none is empty. All are of one width; if it is another one, of several ranks.
    sources: tuple[tuple[Holding, ...], ...]


@dataclass(frozen=True, slots=True)
class Width:
    """The shards of a state that is cut for another number of ranks, as the replica that recovers sees them."""

    layouts: tuple[str, ...]  # the layout of the shard of each rank
    needs: tuple[tuple[int, ...], ...]  # of each rank of the replica that recovers: whose shards it needs parts of


def newest(
    holdings: Iterable[Holding],
    replica: int,
    layouts: Sequence[str],
    hosts: Sequence[str],
    excluded: Collection[Holding] = (),
    widths: Mapping[int, Width] | None = None,
) -> Recoverable | None:
    """Return the newest state of which every shard is complete in some agent, or None if there is no such state.

    Of one state the shards of the replica's own width come first, then those of the most ranks.

    Args:
        holdings: what all agents that answered hold.
        layouts: the layout of the shard of each of its ranks. Other layouts are left out.
        hosts: the path of the host of each of its ranks.
        excluded: holdings that failed a check.
        widths: other numbers of ranks whose shards count, too.
    """
    own = len(layouts)
    known = {**(widths or {}), own: Width(tuple(layouts), tuple((rank,) for rank in range(own)))}
    found: dict[tuple[StateId, int], list[list[Holding]]] = {}
    for holding in dict.fromkeys(holdings):
        width = known.get(holding.ranks)
        if width is None or not 0 <= holding.rank < holding.ranks or holding in excluded:
            continue
        if holding.layout == width.layouts[holding.rank]:
            key = holding.state, holding.ranks
            if key not in found:
                found[key] = [[] for _ in width.layouts]
            found[key][holding.rank].append(holding)
    whole = [key for key, shards in found.items() if all(shards)]
    if not whole:
        return None
    # Two states of one epoch and step exist only if memory was corrupted; the name decides the same way
    # everywhere.
    state, ranks = max(whole, key=lambda each: (*astuple(each[0]), each[1] == own, each[1]))
    shards = found[state, ranks]
    sources = (
        tuple(
            holding
            for rank in needed
            for holding in sorted(shards[rank], key=lambda holding: _distance(holding, replica, host))
        )
        for needed, host in zip(known[ranks].needs, hosts, strict=True)
    )
    return Recoverable(state, tuple(sources))


class Gathering:
    """Counts shards while agents answer, to tell when to call `newest`. One step for each shard."""

    def __init__(self, head: StateId) -> None:
        self._head = head  # older states do not count
        self._seen: dict[tuple[StateId, int], set[int]] = {}  # by state and width: of which ranks there are shards

    def add(self, shards: Iterable[tuple[StateId, int, int]]) -> bool:
        """Return whether these are the last ones of a state: it is true once for each state and width.

        Args:
            shards: (state, ranks, rank) of each.
        """
        last = False
        for state, ranks, rank in shards:
            seen = self._seen.setdefault((state, ranks), set())
            if state_id.newer(self._head, state) or rank in seen or not 0 <= rank < ranks:
                continue
            seen.add(rank)
            last = last or len(seen) == ranks
        return last


def rung(used: Iterable[Iterable[Holding]], replica: int, hosts: Sequence[str]) -> Rung:
    """Return what a replica had to use: "agent" if each shard was on its own host, else the farthest source.

    Args:
        used: the sources of each rank.
        hosts: the path of the host of each of its ranks.
    """
    worst = 0
    for holdings, host in zip(used, hosts, strict=True):
        if any(holding.replica != replica for holding in holdings):
            worst = max(worst, RUNGS.index("replica"))
        elif any(holding.host != host for holding in holdings):
            worst = max(worst, RUNGS.index("copy"))
    return RUNGS[worst]


def _distance(holding: Holding, replica: int, host: str) -> tuple[object, ...]:
    """Return a key that sorts sources: the own host, the own replica, the own rack, the own zone, the others."""
    far = Host.parse(host).distance(Host.parse(holding.host))
    return far > 0, holding.replica != replica, far, holding.host, holding.address
