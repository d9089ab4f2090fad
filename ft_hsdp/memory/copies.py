"""Which copies of the state a membership lacks, and which hosts make them.

In HSDP each healthy replica holds every shard, so N replicas on hosts apart are N copies already. Only what is
missing is made (DeadPool and GEMINI always copy to a neighbour): for a job of one replica, for the last healthy
one, and for replicas that share a rack. A healthy replica is one that contributes in this epoch, or stands by. A
replica that is behind does not hold the state yet, so it counts from the epoch in which it has caught up.

Every rank evaluates `missing_copies` on the grant that it is configured with. All come to the same answer, so no
order is sent.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from ft_hsdp.memory.hosts import Host, Level
from ft_hsdp.memory.placement import groups, holders, probing

MAX_COPIES = 128  # shards of other hosts that one agent keeps, at most
SLOTS = 2  # of a shard in the steady state: one is written while the other is kept
OWN_SLOTS = 3  # of a rank's own where copies are made: the newest state with copies may be none of the two newest

Domain = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemberHosts:
    replica: int
    hosts: tuple[Host, ...]  # of each rank, in the order of the ranks
    healthy: bool  # it holds the state that the epoch's first step begins with


@dataclass(frozen=True, slots=True)
class Copy:
    """An order to a host: keep the newest state of this shard."""

    replica: int  # whose shard it is
    rank: int
    holder: Host


@dataclass(frozen=True, slots=True)
class Plan:
    copies: tuple[Copy, ...]  # to make, by rank
    unprotected: tuple[int, ...]  # ranks whose shards have fewer copies than wanted, also with those
    reason: str  # why; "" if there are none

    def kept_by(self, host: str) -> tuple[Copy, ...]:
        """Return the copies that a host has to hold before its ranks say that the state is kept."""
        return tuple(copy for copy in self.copies if copy.holder.name == host)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a host said of a copy that it is to hold: it does not keep it."""

    replica: int  # whose shard it is
    rank: int
    host: str  # name of the holder


def default_copies(hosts: Collection[Host], level: Level) -> int:
    """Return how many copies a job keeps that does not say it: 2 if there are hosts apart, else 1."""
    return min(2, len({host.domain(level) for host in hosts}))


def room(budget_gb: float | None, shard: int) -> int:
    """Return how many shards of ``shard`` bytes a host can keep for others (`memory.budget_gb`)."""
    if budget_gb is None or not shard:
        return MAX_COPIES
    return min(MAX_COPIES, int(budget_gb * 1e9 // (SLOTS * shard)))


def coverage(members: Sequence[MemberHosts], plan: Plan, level: Level) -> int:
    """Return in how many failure domains each shard of the newest state is at least, once a plan is carried out.

    Args:
        plan: what `missing_copies` has returned for them.
        level: what the hosts of two copies must not share.
    """
    healthy = _healthy(members)
    if not healthy:
        return 0
    domains = _covered(healthy, level)
    for copy in plan.copies:
        domains[copy.rank].add(copy.holder.domain(level))
    return min(map(len, domains), default=0)


def unmet(members: Sequence[MemberHosts], copies: int, level: Level, room: int | None = None) -> str:
    """Return what the hosts of a whole job allow instead of so many copies; "" if they can hold them.

    Args:
        members: all replicas of the job; they count as healthy.
        copies: wanted copies of each shard.
        level: what the hosts of two copies must not share.
        room: shards that a host can keep for others; None: no limit.
    """
    whole = [replace(member, healthy=True) for member in members]
    plan = missing_copies(whole, copies, level, room)
    if not plan.unprotected:
        return ""
    way = "more hosts apart (hosts.per_replica under `up`), another memory.apart, or null: as many as possible"
    return f"at most {coverage(whole, plan, level)} here ({plan.reason}); the way out: {way}"


def missing_copies(members: Sequence[MemberHosts], copies: int, level: Level, room: int | None = None) -> Plan:
    """Return which copies have to be made besides those that the healthy replicas are.

    The healthy replica with the lowest id makes them, so that no two replicas rely on each other; of replicas of
    unequal width, one with the most ranks, and the narrower ones count for nothing. Its hosts keep each other's
    shards in the groups of `placement.groups`. A holder that is full, or in a domain that has a copy already, is
    replaced: by the next host of the shard's probing sequence, then by a host of another replica. The other
    copies stay where they are. Between the hosts of other replicas none moves when yet another replica comes or
    goes. All hosts live: the members of a grant have no others, and a copy that its holder refuses moves by
    `move_refused`.

    Args:
        copies: wanted copies of each shard, the owner's own one and those of healthy replicas included.
        level: what the hosts of two copies must not share.
        room: shards that a host can keep for others; None: no limit.

    Returns:
        The copies to make. None if the healthy replicas suffice.
    """
    healthy = _healthy(members)
    if not healthy:
        return Plan((), (), "")
    first = healthy[0]
    covered = _covered(healthy, level)
    deficit = copies - min(map(len, covered))
    if deficit <= 0:
        return Plan((), (), "")
    candidates = _Candidates(first, healthy[1:], 1 + deficit, level)
    made = _assign(first, covered, copies, level, candidates, room)
    unprotected = tuple(rank for rank, domains in enumerate(covered) if len(domains) < copies)
    reason = ""
    if unprotected:
        known = {host.domain(level) for host in candidates.all}
        full = room is not None and len(known) >= copies
        what = f"each host has room for {room} copies" if full else f"{level}s that can keep one: {len(known)}"
        reason = f"{copies} copies on different {level}s are wanted; {what}"
    return Plan(tuple(sorted(made, key=lambda copy: (copy.rank, copy.holder))), unprotected, reason)


def move_refused(
    members: Sequence[MemberHosts], plan: Plan, level: Level, refusals: Sequence[Refusal], room: int | None = None
) -> Plan:
    """Return a plan in which the copy that its holder refuses, as the last of `refusals` says, is elsewhere.

    It moves to the next own host of the replica in the shard's probing sequence that has room, has not refused
    it, and is in a failure domain without a copy of it. No other copy moves. Without such a host it stays where
    it is: its holder is asked again for each state, and the votes say that the state is not kept.

    Args:
        plan: what `missing_copies` has returned for them, after the earlier refusals.
        level: what the hosts of two copies must not share.
        refusals: in the order in which they were told, the last one not looked at yet.
        room: shards that a host can keep for others; None: no limit.
    """
    last = refusals[-1]
    healthy = _healthy(members)
    refused = next((c for c in plan.copies if (c.replica, c.rank, c.holder.name) == astuple(last)), None)
    if not healthy or refused is None:
        return plan
    first, others = healthy[0], tuple(copy for copy in plan.copies if copy != refused)
    taken = _covered(healthy, level)[last.rank] | {c.holder.domain(level) for c in others if c.rank == last.rank}
    kept = Counter(copy.holder.name for copy in others)
    unable = {each.host for each in refusals if (each.replica, each.rank) == (last.replica, last.rank)}
    own = list(dict.fromkeys(first.hosts))
    for i in probing(own.index(first.hosts[last.rank]), len(own)):
        full = room is not None and kept[own[i].name] >= room
        if not full and own[i].name not in unable and own[i].domain(level) not in taken:
            copies = (*others, replace(refused, holder=own[i]))
            return replace(plan, copies=tuple(sorted(copies, key=lambda copy: (copy.rank, copy.holder))))
    return plan


def _healthy(members: Sequence[MemberHosts]) -> list[MemberHosts]:
    """Return the healthy members with the most ranks, that with the lowest id first.

    Narrower ones have other shards: they are no copies, and their ranks do not know what a holder has to fetch.
    """
    healthy = [member for member in members if member.healthy]
    most = max((len(member.hosts) for member in healthy), default=0)
    return sorted((member for member in healthy if len(member.hosts) == most), key=lambda member: member.replica)


def _covered(healthy: Sequence[MemberHosts], level: Level) -> list[set[Domain]]:
    """Return the failure domains of each shard, by rank, before any copy is made."""
    return [{member.hosts[rank].domain(level) for member in healthy} for rank in range(len(healthy[0].hosts))]


class _Candidates:
    def __init__(self, first: MemberHosts, others: Sequence[MemberHosts], size: int, level: Level) -> None:
        self._ranks = first.hosts
        self._own = list(dict.fromkeys(first.hosts))
        self._size = min(size, len(self._own))
        self._group = {host: group for group in groups(self._own, self._size, level) for host in group}
        self._number = {host: i for i, host in enumerate(self._own)}
        foreign = dict.fromkeys(host for member in others for host in member.hosts)
        self._foreign = [host for host in foreign if host not in self._number]

    @property
    def all(self) -> list[Host]:
        return [*self._own, *self._foreign]

    def preferred(self, rank: int) -> Iterator[Host]:
        """Yield the other members of the owner's group, which keep its shards while they have room."""
        owner = self._ranks[rank]
        yield from holders(self._group[owner], owner, self._size)

    def further(self, rank: int) -> Iterator[Host]:
        """Yield all hosts that can keep a copy of a shard, in the order in which they replace a holder.

        Own hosts come in the shard's probing sequence. Hosts of other replicas come and go with those, so each has
        a place of its own in the order of a shard (rendezvous hashing): the others keep theirs.
        """
        yield from (self._own[i] for i in probing(self._number[self._ranks[rank]], len(self._own)))
        yield from sorted(self._foreign, key=lambda host: _place(rank, host.name))


def _place(rank: int, host: str) -> bytes:
    """Return the place of a host among those of other replicas that may keep the shard of a rank."""
    return hashlib.blake2b(f"{rank}/{host}".encode(), digest_size=8).digest()


def _assign(
    first: MemberHosts,
    covered: Sequence[set[Domain]],
    copies: int,
    level: Level,
    candidates: _Candidates,
    room: int | None,
) -> list[Copy]:
    """Choose the holders, and add their domains to `covered`.

    All preferred holders come before any replacement: a replacement must not take the room of a copy that stays.
    """
    made: list[Copy] = []
    kept: Counter[str] = Counter()  # shards that each host keeps for others
    for choose in (candidates.preferred, candidates.further):
        for rank in range(len(first.hosts)):
            for holder in choose(rank):
                if len(covered[rank]) >= copies:
                    break
                if holder.domain(level) in covered[rank] or (room is not None and kept[holder.name] >= room):
                    continue
                covered[rank].add(holder.domain(level))
                kept[holder.name] += 1
                made.append(Copy(first.replica, rank, holder))
    return made
