"""World: one state of a lighthouse and N replicas, joined by messages that may be late or lost.

A world is a small tuple of interned ids, so that hashing a state and repeating a transition cost almost
nothing. Gradients are replaced by their meaning: the ``content`` of a replica is the list of steps it has
applied, each the set of (data shard, batch, contributor) inside it. Two replicas that claim one StateId must
hold one content.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from ft_hsdp.core.commit import AttemptId, CommitToken
from ft_hsdp.core.effects import RequestGrant
from ft_hsdp.core.grant import Answer, Grant, Member
from ft_hsdp.core.incarnation import IncarnationId
from ft_hsdp.core.ledger import Assignment, Ledger
from ft_hsdp.core.state_id import StateId

RUN, SECOND_RUN = "a", "b"  # a second supervisor names its run otherwise

Content = tuple[frozenset[tuple[int, int, int]], ...]
T = TypeVar("T", bound=Hashable)
E = TypeVar("E", bound=Hashable)
F = TypeVar("F")


class Interned(Generic[T]):
    """Objects by small ids, and ids by object."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._ids: dict[T, int] = {}

    def id(self, item: T) -> int:
        """The id of ``item``; equal items share one."""
        found = self._ids.get(item)
        if found is None:
            found = self._ids[item] = len(self.items)
            self.items.append(item)
        return found


class Cores(Interned[T], Generic[T, E, F]):
    """States of one kind of core by small ids, and its transitions, each computed once.

    T, E, F: its states, events and effects.
    """

    def __init__(self, transition: Callable[[T, E], tuple[T, tuple[F, ...]]]) -> None:
        super().__init__()
        self._transition = transition
        self._known: dict[tuple[int, E], tuple[int, tuple[F, ...]]] = {}

    def after(self, state: int, event: E) -> tuple[int, tuple[F, ...]]:
        """The id of the state after an event in the state of this id, and the effects."""
        found = self._known.get((state, event))
        if found is None:
            reached, due = self._transition(self.items[state], event)
            found = self._known[state, event] = (self.id(reached), due)
        return found


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may go wrong, and how often.

    ``deaths`` are killed replicas, ``pauses`` ends of the lighthouse's patience with a silent one,
    ``restarts`` and ``wipes`` those of the lighthouse with and without its store, ``breaks`` links that break
    with nobody dead, ``lapses`` answers that come too late. With ``late_tokens`` a token outlives its ring. With
    ``recovery`` a replica may find one of its two newest states again when it is restarted. ``flips`` are states
    that change silently in their replica's memory. With ``patient`` a step waits for the fetch of one behind.
    ``drains`` are replicas that an operator sends away for good, ``leaves`` are told to end and are started again.
    ``doubles`` is 1 if a second supervisor may start a replica beside the life that there is.
    ``copies`` are copies of the lighthouse's store, of which the newest is put back once. ``cut`` are two replicas
    that can never connect to each other. ``shortages`` are replicas that have no descriptor, port or memory left
    to connect with, ``exiles`` are replicas that cannot reach the lighthouse for longer than their lease.
    ``min_replicas`` contribute to each step, or none is made.
    """

    replicas: int = 3
    steps: int = 2
    deaths: int = 1
    pauses: int = 1
    restarts: int = 1
    wipes: int = 0
    breaks: int = 0
    lapses: int = 0
    late_tokens: bool = False
    replicated_cursors: bool = True
    recovery: bool = False
    flips: int = 0
    patient: bool = False
    drains: int = 0
    leaves: int = 0
    doubles: int = 0
    copies: int = 0
    cut: tuple[int, int] | None = None
    shortages: int = 0
    exiles: int = 0
    min_replicas: int = 1
    assignment: Assignment = "per_replica"


class WorldEntry(NamedTuple):
    """What one incarnation brought into a ring: its grant's term, its weight, its batch, what it builds on."""

    replica: int
    incarnation: str
    term: int
    weight: int
    shard: int
    batch: int
    prev: str


class Kept(NamedTuple):
    """A snapshot: the name of a state, and its content."""

    state: StateId
    content: int


class Flip(NamedTuple):
    """The state of one life of a replica is corrupt since it had ``step`` steps."""

    replica: int
    life: int
    step: int


class CommitSeen(NamedTuple):
    """A commit that happened: its content and the members that hold or could apply it."""

    content: int
    epoch: int
    holders: frozenset[tuple[int, str]]


class World(NamedTuple):
    """One state of the world: a place for each replica, and one more for a second life of ``second`` (-1: none).

    Core ids of -1 are dead; ``asked`` are open asks, ``answers`` in flight; ``exits`` are not reported
    yet; ``late`` are replicas that were started again when the job was over, or drained; ``kept`` are the states,
    newest first, that outlive a replica's death on its machine; ``flipped`` are lives whose state is corrupt;
    ``copy`` is the state of the lighthouse of which a copy was put aside (-1: none); ``short`` are incarnations
    that cannot connect, ``exiled`` are places from which the lighthouse cannot be reached.
    """

    replicas: tuple[int, ...]
    content: tuple[int, ...]
    kept: tuple[tuple[Kept, ...], ...]
    local: tuple[int, ...]
    lighthouse: int
    asked: tuple[RequestGrant | None, ...]
    answers: tuple[Answer | None, ...]
    tokens: tuple[tuple[int, CommitToken], ...]
    rings: tuple[tuple[AttemptId, tuple[WorldEntry, ...]], ...]
    exits: tuple[tuple[int, str], ...]
    lives: tuple[int, ...]
    late: frozenset[int]
    commits: frozenset[CommitSeen]
    flipped: frozenset[Flip]
    deaths: int
    pauses: int
    restarts: int
    wipes: int
    breaks: int
    lapses: int
    flips: int
    drains: int = 0
    leaves: int = 0
    doubles: int = 0
    second: int = -1
    copies: int = 0
    copy: int = -1
    shortages: int = 0
    short: frozenset[str] = frozenset()
    exiles: int = 0
    exiled: frozenset[int] = frozenset()


def first(b: Bounds, replicas: tuple[int, ...], content: int, lighthouse: int) -> World:
    """The world in which nothing has happened.

    replicas: ids of their cores; content: id of the content of nothing; lighthouse: id of its core.
    """
    return World(
        replicas=replicas,
        content=(content,) * b.replicas,
        kept=((),) * b.replicas,
        local=(0,) * b.replicas,
        lighthouse=lighthouse,
        asked=(None,) * b.replicas,
        answers=(None,) * b.replicas,
        tokens=(),
        rings=(),
        exits=(),
        lives=(0,) * b.replicas,
        late=frozenset(),
        commits=frozenset(),
        flipped=frozenset(),
        deaths=b.deaths,
        pauses=b.pauses,
        restarts=b.restarts,
        wipes=b.wipes,
        breaks=b.breaks,
        lapses=b.lapses,
        flips=b.flips,
        drains=b.drains,
        leaves=b.leaves,
        doubles=b.doubles,
        copies=b.copies,
        shortages=b.shortages,
        exiles=b.exiles,
    )


def put(row: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    """``row`` with its item ``i`` replaced."""
    return (*row[:i], value, *row[i + 1 :])


@cache
def ledger(content: Content, shards: int) -> Ledger:
    """The ledger after ``content``."""
    if not content:
        return Ledger.empty(shards)
    *before, newest = content
    takers = tuple(sorted(replica for _, _, replica in newest))
    return ledger(tuple(before), shards).advance(((s, i) for s, i, _ in newest), takers)


def named(replica: int, life: int, run: str = RUN) -> str:
    """The name of one life of a replica."""
    return str(IncarnationId(replica, run, life))


def same_run(one: tuple[int, str], other: tuple[int, str]) -> bool:
    """Whether two incarnations are lives of one replica that one supervisor started."""
    a, b = IncarnationId.parse(one[1]), IncarnationId.parse(other[1])
    assert a is not None
    assert b is not None
    return (a.replica, a.run_id) == (b.replica, b.run_id)


def replica_at(w: World, place: int) -> int:
    """The id of the replica that has this place."""
    return w.second if place == len(w.replicas) - 1 and w.second >= 0 else place


def name_at(w: World, place: int) -> str:
    """The newest incarnation at this place; a second supervisor's run has another name."""
    r = replica_at(w, place)
    return named(r, w.lives[place], RUN if r == place else SECOND_RUN)


def place_of(w: World, member: tuple[int, str]) -> int | None:
    """Where an incarnation lives, or was the newest one that did."""
    last = len(w.replicas) - 1
    return next(
        (p for p in {member[0], last} if replica_at(w, p) == member[0] and name_at(w, p) == member[1]), None
    )


def edges(grant: Grant) -> list[tuple[Member, Member]]:
    """The edges of a ring, each from a member to its right neighbour."""
    members = grant.members
    return list(zip(members, (*members[1:], members[0]), strict=True)) if len(members) > 1 else []


def severed(b: Bounds, w: World, edge: tuple[Member, Member]) -> bool:
    """Whether two neighbours cannot connect to each other."""
    return {m.replica for m in edge} == set(b.cut or ()) or bool(w.short & {m.incarnation for m in edge})


class Running(dict[int, Any]):
    """What runs, as a mapping that can be part of a memo key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))
