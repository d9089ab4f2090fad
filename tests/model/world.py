"""One state of a lighthouse and N replicas, joined by messages that may be late or lost.

A world is a small tuple of interned ids, so hashing a state and repeating a transition cost almost nothing.
Gradients are replaced by their meaning: the *content* of a replica is the list of steps that it has applied, each
the set of (data shard, unit, contributor) inside it. Two replicas that claim one StateId must have one content.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

from ft_hsdp.core.commit import AttemptId, CommitToken
from ft_hsdp.core.effects import RequestGrant
from ft_hsdp.core.grant import Answer, Grant, Member
from ft_hsdp.core.ledger import Ledger, Run
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import EACH_ITS_BATCH, Places, UnitPolicy

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
        """Return the id of `item`; equal items share one."""
        found = self._ids.get(item)
        if found is None:
            found = self._ids[item] = len(self.items)
            self.items.append(item)
        return found


class Cores(Interned[T], Generic[T, E, F]):
    """The states of one kind of core by small ids, and its transitions, each computed once.

    T, E, F: its states, events and effects.
    """

    def __init__(self, transition: Callable[[T, E], tuple[T, tuple[F, ...]]]) -> None:
        super().__init__()
        self._transition = transition
        self._known: dict[tuple[int, E], tuple[int, tuple[F, ...]]] = {}

    def after(self, state: int, event: E) -> tuple[int, tuple[F, ...]]:
        """Return the id of the state after an event, and the effects."""
        found = self._known.get((state, event))
        if found is None:
            reached, due = self._transition(self.items[state], event)
            found = self._known[state, event] = (self.id(reached), due)
        return found


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may go wrong, and how often."""

    replicas: int = 3  # replicas of the job
    steps: int = 2  # steps of the job
    deaths: int = 1  # replicas that are killed
    pauses: int = 1  # times that the lighthouse loses its patience with a silent replica
    restarts: int = 1  # restarts of the lighthouse with its store
    wipes: int = 0  # restarts of the lighthouse with an empty store
    breaks: int = 0  # links that break although both ends live
    lapses: int = 0  # answers of the lighthouse that come too late
    late_tokens: bool = False  # a token outlives its ring
    # Units are taken from the replicated ledger; False: each replica counts its own.
    replicated_cursors: bool = True
    recovery: bool = False  # a replica that is restarted may find one of its two newest states
    flips: int = 0  # states that change silently in their replica's memory
    patient: bool = False  # a step waits for the fetch of a replica that is behind
    drains: int = 0  # replicas that an operator drains and does not undrain
    leaves: int = 0  # replicas that are told to end, and are started again
    doubles: int = 0  # 1: a second supervisor may start a replica beside the incarnation that runs
    copies: int = 0  # copies of the lighthouse's store; the newest is put back once
    cut: tuple[int, int] | None = None  # two replicas that can never connect to each other
    shortages: int = 0  # replicas that have no descriptor, port or memory left to connect with
    exiles: int = 0  # replicas that cannot reach the lighthouse for longer than their lease
    tears: int = 0  # replicas that lose a rank, and whose leader is cut off: they count as exited while it lives
    min_replicas: int = 1  # fewer contributors make no step
    units: UnitPolicy = EACH_ITS_BATCH  # how the units of a step are shared out
    # A replica has trained all units that it started with when a grant asks for fewer; False: only the first one.
    eager: bool = False
    ranks: int = 0  # of a replica that has all its hosts, one on each; 0: nobody looks at widths
    started_with: tuple[int, ...] = ()  # ranks that each replica has at first; (): all of them
    losses: int = 0  # hosts that are lost, and no spare is there: their replicas go on with the ranks left
    returns: int = 0  # hosts that come back: their replicas leave at a commit, and start with more ranks
    lies: int = 0  # wrong reports, all of them of one replica
    lie: str = ""  # what is wrong in them (`lies.LIES`)
    copied: bool = False  # each host has copies of its replica's other shards: a lost one takes no snapshot along


class WorldEntry(NamedTuple):
    replica: int
    incarnation: str
    term: int  # of its grant
    runs: tuple[Run, ...]  # what it trained; (): it relays
    prev: str  # lineage that it builds on
    widths: tuple[int, ...]  # ranks of the members, by its grant; (): they have one number


class Kept(NamedTuple):
    state: StateId  # its name
    content: int  # id of its content


class Flip(NamedTuple):
    """The state of one incarnation of a replica is corrupt."""

    replica: int
    life: int
    step: int  # number of steps that the state had when it was corrupted


class CommitSeen(NamedTuple):
    content: int  # id of the content after it
    epoch: int
    holders: frozenset[tuple[int, str]]  # members that hold it or could apply it


class World(NamedTuple):
    """One state of the world. Tuples have a place for each replica, and one more for a second life of `second`."""

    replicas: tuple[int, ...]  # ids of their cores; -1: dead
    content: tuple[int, ...]  # ids of what they have applied
    kept: tuple[tuple[Kept, ...], ...]  # snapshots, newest first, that outlive a replica's death on its machine
    local: tuple[int, ...]  # how many units each has taken, without `replicated_cursors`
    trained: tuple[Places, ...]  # what each has trained of the step under way
    lighthouse: int  # id of its core
    asked: tuple[RequestGrant | None, ...]  # open requests
    answers: tuple[Answer | None, ...]  # answers on their way
    tokens: tuple[tuple[int, CommitToken], ...]  # (place, token) on their way
    rings: tuple[tuple[AttemptId, tuple[WorldEntry, ...]], ...]  # what was brought into the ring of each attempt
    exits: tuple[tuple[int, str], ...]  # incarnations that have exited without the lighthouse knowing it
    lives: tuple[int, ...]  # number of restarts
    late: frozenset[int]  # replicas that were started again when the job was over, or drained
    commits: frozenset[CommitSeen]  # commits that must not get lost
    flipped: frozenset[Flip]  # incarnations whose state is corrupt
    deaths: int  # this and the following counters: how often it may still happen
    pauses: int
    restarts: int
    wipes: int
    breaks: int
    lapses: int
    flips: int
    drains: int = 0
    leaves: int = 0
    doubles: int = 0
    second: int = -1  # the replica of which there is a second life; -1: none
    copies: int = 0
    copy: int = -1  # id of the lighthouse's core of which a copy was put aside; -1: none
    shortages: int = 0
    short: frozenset[str] = frozenset()  # incarnations that cannot connect
    exiles: int = 0
    exiled: frozenset[int] = frozenset()  # places from which the lighthouse cannot be reached
    tears: int = 0
    torn: frozenset[int] = frozenset()  # places that lost a rank: they vote no more
    widths: tuple[tuple[int, ...], ...] = ()  # ranks of each life of each replica; (): without `Bounds.ranks`
    left: tuple[int, ...] = ()  # ranks on the hosts that each replica has now: the width of its next life
    losses: int = 0
    returns: int = 0
    growing: frozenset[int] = frozenset()  # replicas that leave, or have left, because a host is back
    lies: int = 0
    liar: int = -1  # the replica that has reported something wrong; -1: none has
    false: tuple[StateId, ...] = ()  # the states in its wrong reports


COUNTERS = (
    *("deaths", "pauses", "restarts", "wipes", "breaks", "lapses", "flips", "drains", "leaves", "doubles"),
    *("copies", "shortages", "exiles", "tears", "losses", "returns", "lies"),
)
"""What may still happen so often: a bound, and what is left of it in a world."""


def first(b: Bounds, replicas: tuple[int, ...], content: int, lighthouse: int) -> World:
    """Return the world in which nothing has happened.

    Args:
        b: the bounds.
        replicas: ids of their cores.
        content: id of the empty content.
        lighthouse: id of its core.
    """
    widths = (b.started_with or (b.ranks,) * b.replicas) if b.ranks else ()
    return World(
        replicas=replicas,
        content=(content,) * b.replicas,
        kept=((),) * b.replicas,
        local=(0,) * b.replicas,
        trained=((),) * b.replicas,
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
        widths=tuple((width,) for width in widths),
        left=widths,
        **{name: getattr(b, name) for name in COUNTERS},
    )


def weight(run: Run) -> int:
    """Return the weight of a run of units, which have unequal ones, as tokens have."""
    _, begin, count = run
    return sum(1 + unit % 3 for unit in range(begin, begin + count))


def put(row: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    """Return `row` with its item `i` replaced."""
    return (*row[:i], value, *row[i + 1 :])


@cache
def ledger(content: Content, shards: int) -> Ledger:
    if not content:
        return Ledger.empty(shards)
    *before, newest = content
    return ledger(tuple(before), shards).advance((s, i, 1) for s, i, _ in newest)


def named(replica: int, life: int, run: str = RUN) -> str:
    return str(IncarnationId(replica, run, life))


def same_run(one: tuple[int, str], other: tuple[int, str]) -> bool:
    """Return whether two incarnations are lives of one replica that one supervisor started."""
    a, b = IncarnationId.parse(one[1]), IncarnationId.parse(other[1])
    assert a is not None
    assert b is not None
    return (a.replica, a.run_id) == (b.replica, b.run_id)


def replica_at(w: World, place: int) -> int:
    return w.second if place == len(w.replicas) - 1 and w.second >= 0 else place


def name_at(w: World, place: int) -> str:
    """Return the newest incarnation at this place; a second supervisor's run has another name."""
    r = replica_at(w, place)
    return named(r, w.lives[place], RUN if r == place else SECOND_RUN)


def width_of(w: World, member: tuple[int, str]) -> int:
    """Return how many ranks an incarnation has, or had; 0: widths play no part."""
    name = IncarnationId.parse(member[1])
    return w.widths[member[0]][name.restarts] if name is not None and w.widths else 0


def place_of(w: World, member: tuple[int, str]) -> int | None:
    """Return where an incarnation lives, or was the newest one that did; None if it is older."""
    last = len(w.replicas) - 1
    return next(
        (p for p in {member[0], last} if replica_at(w, p) == member[0] and name_at(w, p) == member[1]), None
    )


def edges(grant: Grant) -> list[tuple[Member, Member]]:
    """Return the edges of a ring, each from a member to its right neighbour."""
    members = grant.members
    return list(zip(members, (*members[1:], members[0]), strict=True)) if len(members) > 1 else []


def severed(b: Bounds, w: World, edge: tuple[Member, Member]) -> bool:
    """Return whether two neighbours cannot connect to each other."""
    return {m.replica for m in edge} == set(b.cut or ()) or bool(w.short & {m.incarnation for m in edge})


class Running(dict[int, Any]):
    """What runs, as a mapping that can be part of a memo key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))
