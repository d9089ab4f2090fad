"""What the copies of one epoch are for one rank: which it orders, and whether the job is protected with them.

Every rank plans from its grant and from the refusals that commits have told. All ranks of a replica are told the
same, so they plan alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ft_hsdp.config.running import MemoryConfig
from ft_hsdp.core.grant import Grant, paths
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError
from ft_hsdp.memory.blocks import runs_in_words
from ft_hsdp.memory.copies import SLOTS, MemberHosts, Plan, Refusal, coverage, missing_copies, move_refused, room
from ft_hsdp.memory.hosts import Host
from ft_hsdp.state.agent.messages import ShardIndex
from ft_hsdp.state.transfer.shard_manifest import ExpectedShard

DEFAULT_COPIES = 2


@dataclass(frozen=True, slots=True)
class CopiedShard:
    """What all replicas have in common of a rank's shard."""

    layout: str  # fingerprint of its tensors
    nbytes: int  # packed


@dataclass(frozen=True, slots=True)
class CopyPlan:
    epoch: int
    base: StateId
    whole: Plan
    copies: int  # failure domains in which each shard is, once the plan is carried out
    # What this rank orders: shards by (replica, rank), of the state `base`, and the owner's state server.
    orders: dict[ShardIndex, tuple[ExpectedShard, str]]
    source: bool  # this rank's shard is copied by another host
    speaks: bool  # this replica is the healthy one with the lowest id
    wanted: int
    foreign: bool = False  # a host of another replica keeps a copy

    @property
    def lacks(self) -> str:
        """Why the shards are not protected even when the plan is carried out; "" if they are."""
        if self.copies >= max(DEFAULT_COPIES, self.wanted):
            return ""
        return self.whole.reason or f"each shard is wanted on {self.wanted} host alone (memory.copies)"

    def keepers(self, replica: int) -> dict[str, str]:
        """Return which ranks' shards of a replica each host keeps a copy of, as "0-3, 6", by the host's name."""
        ranks: dict[str, list[int]] = {}
        for copy in self.whole.copies:
            if copy.replica == replica:
                ranks.setdefault(copy.holder.name, []).append(copy.rank)
        return {host: ", ".join(runs_in_words(kept)) for host, kept in sorted(ranks.items())}


def hosts_of(grant: Grant) -> tuple[MemberHosts, ...]:
    """Return the members of an epoch with their hosts; () if the hosts of one are not known."""
    found = tuple(
        MemberHosts(m.replica, tuple(map(Host.parse, paths(m.hosts))), m.holds_base) for m in grant.members
    )
    return found if all(member.hosts for member in found) else ()


def checked_room(budget_gb: float | None, shards: Sequence[CopiedShard]) -> int:
    """Return how many shards a host may keep for others; a budget without room for one is refused."""
    largest = max(shard.nbytes for shard in shards)
    count = room(budget_gb, largest)
    if not count:
        least = SLOTS * largest / 1e9
        allowed = f"at least {least:.3g} ({SLOTS} copies of a shard of {largest / 1e9:.3g} GB), or null: no limit"
        raise ConfigError("memory.budget_gb", budget_gb, allowed)
    return count


@dataclass(eq=False)
class CopyPlanner:
    """Plans the copies of each epoch for one rank; does not block."""

    replica: int
    rank: int
    config: MemoryConfig
    shards: Sequence[CopiedShard]  # of each rank
    limit_s: float  # a vote waits less than that for copies, and a copy that takes longer is given up
    copied: bool = True  # whether each state is copied into its own host's memory

    def __post_init__(self) -> None:
        self.room = checked_room(self.config.budget_gb, self.shards)  # shards that each host keeps for others

    def plan(self, grant: Grant, members: tuple[MemberHosts, ...], refusals: Sequence[Refusal]) -> CopyPlan:
        """Return the plan of an epoch.

        Args:
            refusals: Of holders of this replica's copies, in the order in which commits told them.
        """
        wanted = self.config.copies or DEFAULT_COPIES
        speaks = self.replica == min((m.replica for m in grant.donors), default=None)
        if not members:
            known = "the hosts of the ranks are not known" if self.copied else "state.snapshot is on_demand"
            return CopyPlan(grant.epoch, grant.base, Plan((), (), known), 0, {}, False, speaks, wanted)
        level = self.config.apart
        whole = missing_copies(members, wanted, level, self.room)
        for told in range(1, len(refusals) + 1):
            whole = move_refused(members, whole, level, refusals[:told], self.room)
        source = any((copy.replica, copy.rank) == (self.replica, self.rank) for copy in whole.copies)
        copies = coverage(members, whole, level)
        orders = self._orders(grant, members, whole)
        own = {(member.replica, host.name) for member in members for host in member.hosts}
        foreign = any((copy.replica, copy.holder.name) not in own for copy in whole.copies)
        return CopyPlan(grant.epoch, grant.base, whole, copies, orders, source, speaks, wanted, foreign)

    def _orders(
        self, grant: Grant, members: tuple[MemberHosts, ...], whole: Plan
    ) -> dict[ShardIndex, tuple[ExpectedShard, str]]:
        """Return what this rank orders: all that its host has to keep, if it is the first rank there.

        Several replicas may have ranks on one host. Then the replica whose shards are copied orders, if it has
        ranks there, and else the one with the lowest id.
        """
        mine = next((member for member in members if member.replica == self.replica), None)
        if mine is None or not mine.healthy:
            return {}
        here = mine.hosts[self.rank].name
        if any(host.name == here for host in mine.hosts[: self.rank]):
            return {}
        there = {m.replica for m in members if m.healthy and any(host.name == here for host in m.hosts)}
        addresses = {member.replica: member.state for member in grant.members}
        return {
            (copy.replica, copy.rank): (
                ExpectedShard(grant.base, copy.rank, len(self.shards), of.layout, of.nbytes),
                addresses[copy.replica][copy.rank],
            )
            for copy in whole.kept_by(here)
            for of in [self.shards[copy.rank]]
            if self.replica == (copy.replica if copy.replica in there else min(there))
        }
