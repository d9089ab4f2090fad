"""One state of the hosts of a job and of what lies in their memory; and what may go wrong.

A replica has one rank on each of its hosts. A committed step is a number here, with the epoch in which it was
committed. What a rank has in the agent of a host is a small value: the slots of production, frozen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.hosts import Host, Level
from ft_hsdp.state.agent.slots import SlotPhase, SnapshotSlots

Step = tuple[int, int]  # epoch, number
Frozen = tuple[tuple[str, Step | None, int, bool, bool, bool, int], ...]  # the slots of one rank in one agent
Memory = tuple[tuple[int, Frozen], ...]  # of one host: the slots of each rank whose shards it has
INITIAL: Step = (0, 0)  # every rank can make this state anew


@dataclass(frozen=True, slots=True)
class CopyBounds:
    """What is explored, and how often something may go wrong."""

    replicas: int = 1
    hosts: int = 2  # of each replica
    spares: int = 0  # further hosts, without ranks
    racks: int = 0  # that the hosts of all replicas fill one after the other; 0: they are not known
    level: Level = "host"
    copies: int = 2
    every: int = 1  # k: every k-th state is copied
    steps: int = 3
    losses: int = 2  # of hosts; with level "rack" of whole racks
    partitions: int = 0  # hosts that are cut off, and come back with what was in their memory
    crashes: int = 0  # replicas whose ranks all end, while their hosts live
    strays: int = 0  # processes that check in with a gang that they are not of
    skips: int = 0  # snapshots that a rank leaves out
    hurries: int = 0  # votes that do not wait for the copies
    refusals: int = 0  # shards that a host keeps no longer for another one
    slots: int = 3  # of a rank in one agent, at most
    own_slots: int = 3  # of one of the agent's own ranks; with 2 there is no memory for who reads


class CopyWorld(NamedTuple):
    """One state of all hosts. What only some bounds need stays as it is at first with the others."""

    head: Step  # newest committed state
    epoch: int  # of the next commit
    places: tuple[int, ...]  # of each rank: its host by number
    down: frozenset[int]  # hosts that are lost or cut off
    aside: tuple[tuple[int, Memory], ...]  # what is in the memory of those that are cut off
    live: tuple[Step | None, ...]  # the state of each rank; None: it is dead
    votes: tuple[bool | None, ...]  # of each rank on the next step: whether it keeps its state
    named: frozenset[tuple[int, int]]  # by those votes: rank that owns, host that refuses its shard
    skipped: tuple[bool, ...]  # whether it has left out the snapshot of its state
    memory: tuple[Memory, ...]  # of each host
    pulls: frozenset[tuple[int, int, Step]]  # under way: host that holds, rank that owns, state
    refusing: frozenset[tuple[int, int]]  # rank that owns, host that has no room for its shard
    told: tuple[tuple[tuple[int, int], ...], ...]  # by replica: such pairs that commits named since it started
    healthy: tuple[bool, ...]  # of each replica: it holds the state that the step begins with
    base: Step  # with which the epoch begins, if not every state is copied
    settled: tuple[bool | None, ...]  # what the newest commit said to each replica; None: nothing
    owed: tuple[tuple[int, ...], ...]  # by host: whose shards it had to keep when the newest commit was voted on
    protected: Step  # newest state of which a commit said that it is kept
    lost: int  # failure domains since then
    whole: Step  # newest state that all hosts have of their own ranks, if replicas may crash
    top: Step  # newest state that was ever committed, if hosts may be cut off
    calm: int  # commits that had to say whether a state is kept, since the last disturbance
    losses: int  # that may still happen; so are those that follow
    partitions: int
    crashes: int
    strays: int
    skips: int
    hurries: int
    refusals: int


Move = tuple[str, Callable[[], CopyWorld]]


def hosts_of(b: CopyBounds) -> list[Host]:
    """Return all hosts by number: those of each replica, then the spare ones."""
    count = b.replicas * b.hosts
    used = [
        Host("", f"k{i * b.racks // count}" if b.racks else "", f"r{i // b.hosts}h{i % b.hosts}")
        for i in range(count)
    ]
    return used + [Host("", f"k{i % b.racks}" if b.racks else "", f"s{i}") for i in range(b.spares)]


def first(b: CopyBounds) -> CopyWorld:
    """Return the first world: all replicas have the initial state."""
    ranks = b.replicas * b.hosts
    hosts = ranks + b.spares
    return CopyWorld(
        head=INITIAL,
        epoch=1,
        places=tuple(range(ranks)),
        down=frozenset(),
        aside=(),
        live=(INITIAL,) * ranks,
        votes=(None,) * ranks,
        named=frozenset(),
        skipped=(False,) * ranks,
        memory=((),) * hosts,
        pulls=frozenset(),
        refusing=frozenset(),
        told=((),) * b.replicas,
        healthy=(True,) * b.replicas,
        base=INITIAL,
        settled=(False,) * b.replicas,
        owed=((),) * hosts,
        protected=INITIAL,
        lost=0,
        whole=INITIAL,
        top=INITIAL,
        calm=0,
        losses=b.losses,
        partitions=b.partitions,
        crashes=b.crashes,
        strays=b.strays,
        skips=b.skips,
        hurries=b.hurries,
        refusals=b.refusals,
    )


def state_id(step: Step) -> StateId:
    """Return the name of a state. One epoch commits a step once, so a lineage adds nothing."""
    return StateId(*step, "")


def put(values: tuple, at: int, value: object) -> tuple:
    """Return `values` with another one in one place."""
    return (*values[:at], value, *values[at + 1 :])


def slots_of(w: CopyWorld, host: int, owner: int) -> Frozen:
    """Return the slots that a host has of a rank's shards."""
    return next((slots for each, slots in w.memory[host] if each == owner), ())


def with_slots(w: CopyWorld, host: int, owner: int, slots: Frozen) -> CopyWorld:
    """Return the world in which a host has these slots of a rank's shards."""
    others = [each for each in w.memory[host] if each[0] != owner]
    return w._replace(memory=put(w.memory, host, tuple(sorted([*others, (owner, slots)]))))


def has(w: CopyWorld, host: int, owner: int, state: Step) -> bool:
    """Return whether a host has a rank's shard of a state."""
    return complete(slots_of(w, host, owner), state)


def complete(slots: Frozen, state: Step) -> bool:
    """Return whether one of the slots has a complete snapshot of a state."""
    return any(slot[:2] == (SlotPhase.COMPLETE.value, state) for slot in slots)


class _Slots(SnapshotSlots):
    """The slots of production, made from a value and turned into one."""

    def __init__(self, frozen: Frozen) -> None:
        super().__init__()
        for phase, state, order, settled, passed, never, readers in frozen:
            slot = self._slots[self.add()]
            slot.phase, slot.state, slot.order = SlotPhase(phase), state_id(state) if state else None, order
            slot.settled, slot.passed, slot.never, slot.readers = settled, passed, never, readers
        self._completed = len(frozen)

    @property
    def frozen(self) -> Frozen:
        """The slots as a value that is the same for slots that behave alike."""
        order = {slot.number: place for place, slot in enumerate(reversed(self._complete()), 1)}
        return tuple(
            sorted(
                (
                    slot.phase.value,
                    (slot.state.commit_epoch, slot.state.step) if isinstance(slot.state, StateId) else None,
                    order.get(slot.number, 0),
                    slot.settled,
                    slot.passed,
                    slot.never,
                    slot.readers,
                )
                for slot in self._slots.values()
            )
        )


@lru_cache
def stage(frozen: Frozen, state: Step, most: int) -> Frozen | None:
    """Return the slots with one in which `state` is written, or None if there is no place for it."""
    slots = _Slots(frozen)
    if slots.stage(state_id(state), 0.0) is None:
        if not (last := len(frozen) >= most):
            slots.add()
        if slots.stage(state_id(state), 0.0, last=last) is None:
            return None
    return slots.frozen


@lru_cache
def staged(frozen: Frozen, state: Step) -> Frozen:
    """Return the slots with the one in which `state` was written as complete."""
    slots = _Slots(frozen)
    slots.staged(state_id(state))
    return slots.frozen


@lru_cache
def read(frozen: Frozen, state: Step, more: int) -> Frozen:
    """Return the slots with one reader of `state` more or less."""
    slots = _Slots(frozen)
    number = slots.find(state_id(state))
    assert number is not None
    if more > 0:
        slots.borrow(number)
    else:
        slots.give_back(number)
    return slots.frozen


@lru_cache
def settle(frozen: Frozen, state: Step, everywhere: bool | None) -> Frozen:
    """Return the slots after it is known whether `state` is kept everywhere; None: no commit says so."""
    slots = _Slots(frozen)
    slots.mark_settled(state_id(state), everywhere)
    return slots.frozen


@lru_cache
def abandon(frozen: Frozen) -> Frozen:
    """Return the slots without what was being written."""
    slots = _Slots(frozen)
    slots.abandon(reuse=True)
    return slots.frozen


def forget_slots() -> None:
    """Forget all that was computed of slots: tests change how they behave."""
    for cached in (stage, staged, read, settle, abandon):
        cached.cache_clear()
