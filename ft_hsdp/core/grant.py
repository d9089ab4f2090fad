"""What the lighthouse grants to a set of replicas, what a replica reports to it, and its other answers.

These dataclasses travel (`ft_hsdp.protocol`) and are stored: their field names are part of the wire format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from ft_hsdp.core.commit import AttemptId, CommitRecord
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places, deal, size

Role = Literal["contribute", "standby", "behind"]

Hosts = tuple[tuple[str, int | tuple[tuple[int, int], ...]], ...]
"""The hosts of a replica's ranks, each once, in the order of their first ranks, as (path, ranks); (): not known.

A path is "zone/rack/host", "rack/host" or "host". Ranks are their number: those that follow the ranks of the host
before. Where the ranks of some host do not follow each other, as when tasks are dealt out to nodes in turns, they
are ranges, at each host of the replica: ((first rank, number of ranks), ...).
"""


def ranks_of(hosts: Hosts) -> list[tuple[str, list[int]]]:
    """Return each host in `hosts` with its ranks."""
    found: list[tuple[str, list[int]]] = []
    after = 0
    for path, ranks in hosts:
        parts = ((after, ranks),) if isinstance(ranks, int) else ranks
        found.append((path, [rank for first, count in parts for rank in range(first, first + count)]))
        after += sum(count for _, count in parts)
    return found


def paths(hosts: Hosts) -> tuple[str, ...]:
    """Return the path of each rank's host, in rank order; `hosts` as `ranges` returns them."""
    of_rank = {rank: path for path, ranks in ranks_of(hosts) for rank in ranks}
    return tuple(of_rank[rank] for rank in sorted(of_rank))


def ranges(paths: Iterable[str]) -> Hosts:
    """Return the hosts of ranks from the `paths` of each rank's host, in rank order; () if one is "", unknown."""
    found: dict[str, list[tuple[int, int]]] = {}
    first = 0
    for path, same in groupby(paths):
        count = len(list(same))
        found.setdefault(path, []).append((first, count))
        first += count
    if "" in found:
        return ()
    if all(len(parts) == 1 for parts in found.values()):
        return tuple((path, count) for path, ((_, count),) in found.items())
    return tuple((path, tuple(parts)) for path, parts in found.items())


@dataclass(frozen=True, slots=True)
class Member:
    """One replica in a grant."""

    replica: int  # replica id
    incarnation: str  # the life of the replica that is meant; another one is no member
    # "behind": it relays, and fetches the base. "standby": it holds the base, and relays until it is needed.
    role: Role
    ring: tuple[str, ...] = ()  # addresses of its ranks' ring listeners, "host:port", in rank order
    state: tuple[str, ...] = ()  # addresses from which its ranks' state is served, "host:port", in rank order
    number: int = 0  # what the lighthouse numbered this incarnation with when it first admitted it
    units: int = 1  # that it trains in each step; of one that is behind: once it contributes
    # Places of the first step of the epoch, where they are others than those of an undisturbed step.
    places: Places = ()
    hosts: Hosts = ()  # of its ranks

    @property
    def holds_base(self) -> bool:
        """Whether it holds the state that the first step of the epoch builds on."""
        return self.role != "behind"


@dataclass(frozen=True, slots=True)
class Grant:
    """A membership: which replicas form the ring of `epoch`, in which order, on which state, in which role."""

    term: int  # life of the lighthouse that granted it
    epoch: int  # number of the membership; never used again
    base: StateId  # the state that the first step of the epoch builds on
    members: tuple[Member, ...]  # in ring order
    total: int  # replicas of the job
    reason: str = field(compare=False)  # why this membership was formed, for the journal
    # Attempts that are known never to be committed, so a record of them may be dropped.
    void: tuple[AttemptId, ...] = ()
    units: int = 1  # wanted in each step: those of a step to which all replicas contribute
    shared: bool = False  # whether all contributors take from one data shard
    dealt: int = 0  # places that were dealt on `base`, by this grant and those before it; 0: by no other
    mac: str = ""  # authenticates the grant when one member shows it to another (`protocol.sign`)

    @property
    def ring(self) -> tuple[int, ...]:
        """The replica ids in ring order."""
        return tuple(m.replica for m in self.members)

    @property
    def widths(self) -> tuple[int, ...]:
        """The ranks of each member, in ring order, if they differ; () if all have the same number."""
        widths = tuple(len(m.ring) for m in self.members)
        return widths if len(set(widths)) > 1 else ()

    def narrower(self, nominal: int, ranks_per_unit: int = 1) -> dict[int, int]:
        """Return the data ranks, by replica id, of the members that have fewer than a whole replica: `nominal`.

        So many as `ranks_per_unit` train one unit together.
        """
        widths = {m.replica: len(m.ring) // ranks_per_unit for m in self.members if m.ring}
        return {replica: width for replica, width in widths.items() if width < nominal}

    def member(self, replica: int, incarnation: str) -> Member | None:
        """Return the entry of one `incarnation` of a `replica`; None if the grant names another one or none."""
        return next((m for m in self.members if m.replica == replica and m.incarnation == incarnation), None)

    @property
    def donors(self) -> tuple[Member, ...]:
        """The members that hold the base and can serve it."""
        return tuple(m for m in self.members if m.holds_base)

    def places(self, step: int) -> dict[int, Places]:
        """Return the places of each member among the untrained units of the state before `step`, by replica id.

        First the contributors in ring order; then, but not for the first step of the epoch, those that are
        behind: what they will probably take in the epoch that makes them contributors.
        """
        first = step == self.base.step + 1
        able = [m for m in self.members if m.role == "contribute"]
        takers = able if first else able + [m for m in self.members if m.role == "behind"]
        dealt = zip(takers, deal([m.units for m in takers], self.shared), strict=True)
        return {m.replica: m.places if first and m.places else usual for m, usual in dealt}

    def following(self, step: int, replica: int) -> int:
        """Return the first place of a member in the step after `step`, counted like those of `step`.

        The `replica` does not stand by. The place is right if the membership stays as it is.
        """
        now, later = self.places(step), self.places(step + 1)[replica]
        before = [m.replica for m in self.members if m.role == "contribute"] if self.shared else [replica]
        return sum(size(now[r]) for r in before) + (later[0][0] if later else 0)


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica tells the lighthouse about itself when it asks for a step."""

    replica: int  # replica id
    incarnation: str  # this life of the replica
    state: StateId  # what all its ranks hold
    step: int  # the step that it asks for
    epoch: int = 0  # the epoch that it is in; 0: none
    after: int = 0  # an epoch whose ring is over for it, so that only a larger epoch helps; 0: none
    max_term: int = 0  # the highest term that it heard of
    prepared: CommitRecord | None = None  # a record that it holds without knowing the verdict
    void: AttemptId | None = None  # an attempt for which it never votes yes
    # A state that is committed, or that it voted to commit, and whose base it does not hold.
    doubt: StateId | None = None
    equal: tuple[int, ...] = ()  # replicas that hold `state`, by the last commit token
    leaving: tuple[int, ...] = ()  # replicas that leave after it, by the last commit token
    lagging: tuple[int, ...] = ()  # replicas that need a newer base than their grant's
    diverged: tuple[int, ...] = ()  # replicas with different states of one name, without a majority
    suspects: tuple[int, ...] = ()  # replicas that its ranks saw die or fall silent in the ring of `after`
    edge: tuple[int, int] | None = None  # (accuser, suspect): which neighbour blamed which in that ring
    saved: int = 0  # step of the newest state that was written on demand
    departs: bool = False  # it was told to leave, and wants to be a member no longer
    number: int = 0  # what its newest grant numbered this incarnation with; 0: no grant yet
    writing: bool = False  # it writes a checkpoint that the end of the job has to wait for
    # The record that led to `state`, if its ring is over or members leave: others may not be there to confirm it.
    committed: CommitRecord | None = None


@dataclass(frozen=True, slots=True)
class Continue:
    """Answer: the membership of `epoch` stands for `step`."""

    epoch: int
    step: int
    leave: bool = False  # leave at the next commit, if other members hold the state then
    checkpoint: int = 0  # write a state of that step or later; 0: no demand


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Answer: no ring for now. A replica that does not hold `base` fetches it; the donors keep it for that.

    Each replica asks again when it holds `base`.
    """

    base: StateId
    donors: tuple[Member, ...] = field(default=())  # replicas that hold `base`
    reason: str = field(default="", compare=False)  # training is over, or too few replicas hold `base` to go on


@dataclass(frozen=True, slots=True)
class Finish:
    """Answer: every replica has the final state, so this one ends."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer: this incarnation may not take part, and ends."""

    reason: str
    exit_code: int  # the code that it ends with
    forget: bool = False  # drop its snapshots first: no replica can use them


Answer = Grant | Continue | CatchUp | Finish | Refused


@dataclass(frozen=True, slots=True)
class Holders:
    """The lighthouse's answer to GET /v1/holders: where copies of the newest state may be. It has no tag."""

    # A member of another replica that holds the base of its epoch is not known to have exited: the job goes on
    # without the asking one.
    stands: bool
    head: StateId | None  # the newest state that is known to be committed; None: there is none
    # "host:port" of the state agents of each replica; also of those whose ranks are dead.
    agents: dict[int, tuple[str, ...]] = field(default_factory=dict)
    # Where each of them stands, as in `Hosts`; not all are known.
    hosts: dict[str, str] = field(default_factory=dict)
