"""The copies of the state in host memory, in every order of snapshots, pulls, votes and lost hosts.

A replica has one rank on each of its hosts. A committed step is a number here. What decides is the product's own
code: `memory.copies` says who keeps which copy, `SnapshotSlots` which memory is written, `memory.recovery` what
is restored. Everything else is as short as it can be: replicas commit together, and a replica that has lost a host
ends at once as a whole, comes back behind the others, and is healthy from the next commit on.

What must hold:

- After a commit that says that the state before it is kept, that state is on as many hosts apart as there are
  copies.
- As long as fewer failure domains are lost than there are copies, a job whose ranks are all dead comes back with
  that state or a newer one.
- Without a further disturbance the second commit says so again.

Run the default space with `python -m ft_hsdp.sim.copies`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.copies import MemberHosts, Plan, missing_copies
from ft_hsdp.memory.hosts import Host, Level
from ft_hsdp.memory.recovery import Holding, newest
from ft_hsdp.sim.explore import search
from ft_hsdp.sim.invariants import Violation
from ft_hsdp.state.agent.slots import SlotPhase, SnapshotSlots

Step = tuple[int, int]  # epoch, number
Frozen = tuple[tuple[str, Step | None, int, bool, bool, int], ...]  # the slots of one rank in one agent
INITIAL: Step = (0, 0)  # every rank can make this state anew


@dataclass(frozen=True, slots=True)
class CopyBounds:
    """What is explored, and how often something may go wrong."""

    replicas: int = 1
    hosts: int = 2  # of each replica
    racks: int = 0  # that the hosts of all replicas fill one after the other; 0: they are not known
    level: Level = "host"
    copies: int = 2
    steps: int = 3
    losses: int = 2  # of hosts; with level "rack" of whole racks
    skips: int = 0  # snapshots that a rank leaves out
    hurries: int = 0  # votes that do not wait for the copies
    slots: int = 3  # of a rank in one agent, at most


class CopyWorld(NamedTuple):
    """One state of all hosts."""

    head: Step  # newest committed state
    epoch: int  # of the next commit
    live: tuple[Step | None, ...]  # of the rank of each host: its state; None: it is dead
    votes: tuple[bool | None, ...]  # of each rank on the next step: whether it keeps its state
    skipped: tuple[bool, ...]  # whether it has left out the snapshot of its state
    memory: tuple[tuple[tuple[int, Frozen], ...], ...]  # of each host: the slots of each rank whose shards it has
    pulls: frozenset[tuple[int, int, Step]]  # under way: holder, owner, state
    healthy: tuple[bool, ...]  # of each replica: it holds the state that the step begins with
    settled: tuple[bool, ...]  # what the newest commit said to each replica
    owed: tuple[tuple[int, ...], ...]  # by host: whose shards it had to keep when the newest commit was voted on
    protected: Step  # newest state of which a commit said that it is kept
    lost: int  # failure domains since then
    calm: int  # commits since the last disturbance
    losses: int  # that may still happen; so are the next two
    skips: int
    hurries: int


Move = tuple[str, Callable[[], CopyWorld]]


class CopySpace:
    """What can happen to the copies of a job."""

    def __init__(self, bounds: CopyBounds) -> None:
        self.bounds = b = bounds
        count = b.replicas * b.hosts
        self._hosts = [
            Host("", f"k{i * b.racks // count}" if b.racks else "", f"r{i // b.hosts}h{i % b.hosts}")
            for i in range(count)
        ]
        self._layouts = [""] * b.hosts
        self._plan = lru_cache(self._planned)

    def initial(self) -> CopyWorld:
        """Return the first world: all replicas have the initial state."""
        n, replicas = len(self._hosts), self.bounds.replicas
        return CopyWorld(
            head=INITIAL,
            epoch=1,
            live=(INITIAL,) * n,
            votes=(None,) * n,
            skipped=(False,) * n,
            memory=((),) * n,
            pulls=frozenset(),
            healthy=(True,) * replicas,
            settled=(False,) * replicas,
            owed=((),) * n,
            protected=INITIAL,
            lost=0,
            calm=0,
            losses=self.bounds.losses,
            skips=self.bounds.skips,
            hurries=self.bounds.hurries,
        )

    def finished(self, w: CopyWorld) -> bool:
        """Whether all replicas have the final state."""
        return w.head[1] == self.bounds.steps and all(live == w.head for live in w.live)

    def patience(self, w: CopyWorld) -> Iterator[Move]:
        """Yield the votes that wait no longer for their copies."""
        for i, live in enumerate(w.live):
            if live == w.head and self._waits(w, i):
                yield f"{self._hosts[i].name} waits no longer for copies of {live}", partial(self._hurry, w, i)

    def successors(self, w: CopyWorld) -> Iterator[Move]:
        """Yield everything that can happen in `w`."""
        if self.finished(w):
            return
        plan = self._plan(w.healthy, tuple(live is not None for live in w.live))
        for i, live in enumerate(w.live):
            if live is not None:
                yield from self._of_rank(w, i, live, plan)
        yield from self._of_pulls(w, plan)
        voting = [i for i, live in enumerate(w.live) if live is not None and w.healthy[i // self.bounds.hosts]]
        if (
            w.head[1] < self.bounds.steps
            and voting
            and all(w.live[i] == w.head and w.votes[i] is not None for i in voting)
        ):
            yield "a step is committed", partial(self._commit, w, voting, plan)
        for r in range(self.bounds.replicas):
            if any(w.live[i] is None for i in self._ranks(r)) and w.healthy.count(True):
                yield f"replica {r} returns behind the others", partial(self._return, w, r)
        if not any(w.healthy):
            yield "the job is restored", partial(self._restore, w)
        if w.losses:
            for domain in {host.domain(self.bounds.level): 0 for host in self._hosts}:
                gone = [i for i, host in enumerate(self._hosts) if host.domain(self.bounds.level) == domain]
                yield f"{' '.join(domain).strip()} is lost", partial(self._lose, w, gone)

    def _ranks(self, replica: int) -> range:
        """Return the hosts of a replica by number, which are also its ranks."""
        return range(replica * self.bounds.hosts, (replica + 1) * self.bounds.hosts)

    def _planned(self, healthy: tuple[bool, ...], alive: tuple[bool, ...]) -> Plan:
        members = [
            MemberHosts(r, tuple(self._hosts[i] for i in self._ranks(r)), healthy[r])
            for r in range(self.bounds.replicas)
            if all(alive[i] for i in self._ranks(r))
        ]
        return missing_copies(members, self.bounds.copies, self.bounds.level)

    def _owner(self, replica: int, rank: int) -> int:
        return replica * self.bounds.hosts + rank

    def _of_rank(self, w: CopyWorld, i: int, live: Step, plan: Plan) -> Iterator[Move]:
        name = self._hosts[i].name
        if live != w.head:
            yield f"{name} applies {w.head}", partial(self._hear, w, i)
            return
        own = _has(w, i, i, live)
        if not own and not w.skipped[i]:
            yield f"{name} copies its shard of {live}", partial(self._snapshot, w, i, live)
            if w.skips:
                skipped = w._replace(skipped=_set(w.skipped, i, True), skips=w.skips - 1, calm=-1)
                yield f"{name} leaves out its copy of {live}", lambda: skipped
        if self._waits(w, i):
            owed = plan.kept_by(name)
            kept = own and all(_has(w, i, self._owner(copy.replica, copy.rank), live) for copy in owed)
            hopeless = any(w.skipped[self._owner(copy.replica, copy.rank)] for copy in owed)
            if kept or w.skipped[i] or hopeless:
                voted = w._replace(votes=_set(w.votes, i, kept))
                yield f"{name} votes, and {'keeps' if kept else 'lacks'} {live}", lambda: voted
            elif w.hurries:
                hurried = self._hurry(w, i)._replace(hurries=w.hurries - 1)
                yield f"{name} votes without the copies of {live}", lambda: hurried

    def _waits(self, w: CopyWorld, i: int) -> bool:
        """Whether this rank has or has left out its snapshot, and has not voted."""
        live = w.live[i]
        done = live is not None and (w.skipped[i] or _has(w, i, i, live))
        return done and w.votes[i] is None and w.healthy[i // self.bounds.hosts]

    def _of_pulls(self, w: CopyWorld, plan: Plan) -> Iterator[Move]:
        number = {host.name: i for i, host in enumerate(self._hosts)}
        for copy in plan.copies:
            holder, owner = number[copy.holder.name], self._owner(copy.replica, copy.rank)
            state = w.live[holder]
            if (
                state is None
                or (holder, owner, state) in w.pulls
                or not _has(w, owner, owner, state)
                or _has(w, holder, owner, state)
            ):
                continue
            begun = partial(self._pull, w, holder, owner, state)
            yield f"{copy.holder.name} begins to copy {self._hosts[owner].name}'s shard of {state}", begun
        for holder, owner, state in sorted(w.pulls):
            done = partial(self._pulled, w, holder, owner, state)
            yield f"{self._hosts[holder].name} has {self._hosts[owner].name}'s shard of {state}", done

    # What happens.

    def _snapshot(self, w: CopyWorld, i: int, state: Step) -> CopyWorld:
        written = _stage(_slots(w, i, i), state, self.bounds.slots)
        if written is None:
            return w._replace(skipped=_set(w.skipped, i, True))
        return _with(w, i, i, _staged(written, state))

    def _hurry(self, w: CopyWorld, i: int) -> CopyWorld:
        return w._replace(votes=_set(w.votes, i, False), calm=-1)

    def _pull(self, w: CopyWorld, holder: int, owner: int, state: Step) -> CopyWorld:
        """A holder begins to copy a shard. A copy that it was making of an older state of it is given up."""
        for older in [pull for pull in w.pulls if pull[:2] == (holder, owner)]:
            w = _with(w, holder, owner, _abandon(_slots(w, holder, owner)))
            w = _with(w, owner, owner, _read(_slots(w, owner, owner), older[2], -1))
            w = w._replace(pulls=w.pulls - {older})
        written = _stage(_slots(w, holder, owner), state, self.bounds.slots)
        if written is None:
            raise Violation(f"no slot: {self._hosts[holder].name} has none for a copy of {state}")
        w = _with(w, holder, owner, written)
        w = _with(w, owner, owner, _read(_slots(w, owner, owner), state, 1))
        return w._replace(pulls=w.pulls | {(holder, owner, state)})

    def _pulled(self, w: CopyWorld, holder: int, owner: int, state: Step) -> CopyWorld:
        w = _with(w, holder, owner, _staged(_slots(w, holder, owner), state))
        w = _with(w, owner, owner, _read(_slots(w, owner, owner), state, -1))
        return w._replace(pulls=w.pulls - {(holder, owner, state)})

    def _hear(self, w: CopyWorld, i: int) -> CopyWorld:
        """A rank applies the newest step, and tells its agent whether the state before it is kept everywhere.

        If it is, the agent frees the copies that the plan of that vote does not name.
        """
        before, settled = w.live[i], w.settled[i // self.bounds.hosts]
        assert before is not None
        for owner, slots in w.memory[i]:
            w = _with(w, i, owner, _settle(slots, before, settled))
            if settled and owner != i and owner not in w.owed[i]:
                w = self._free(w, i, owner)
        return w._replace(live=_set(w.live, i, w.head), skipped=_set(w.skipped, i, False))

    def _free(self, w: CopyWorld, holder: int, owner: int) -> CopyWorld:
        """An agent drops the copies of a shard, and gives up what it copies of it."""
        for pull in [pull for pull in w.pulls if pull[:2] == (holder, owner)]:
            w = _with(w, owner, owner, _read(_slots(w, owner, owner), pull[2], -1))
            w = w._replace(pulls=w.pulls - {pull})
        kept = tuple(each for each in w.memory[holder] if each[0] != owner)
        return w._replace(memory=_set(w.memory, holder, kept))

    def _commit(self, w: CopyWorld, voting: list[int], plan: Plan) -> CopyWorld:
        settled = tuple(
            bool(w.healthy[r]) and all(w.votes[i] for i in self._ranks(r)) for r in range(self.bounds.replicas)
        )
        protected, lost = w.protected, w.lost
        if all(w.votes[i] for i in voting) and not plan.unprotected:
            protected, lost = w.head, 0
            self._is_apart(w, w.head)
        elif w.calm >= 1 and not plan.unprotected:
            raise Violation(f"not protected: {w.head} is not kept, and nothing went wrong since the last commit")
        here = [i for i, live in enumerate(w.live) if live is not None]
        head = (w.epoch, w.head[1] + 1)
        return w._replace(
            head=head,
            votes=(None,) * len(w.votes),
            healthy=tuple(all(i in here for i in self._ranks(r)) for r in range(self.bounds.replicas)),
            settled=settled,
            owed=tuple(
                tuple(sorted(self._owner(copy.replica, copy.rank) for copy in plan.kept_by(host.name)))
                for host in self._hosts
            ),
            protected=protected,
            lost=lost,
            calm=min(2, w.calm + 1),
        )

    def _is_apart(self, w: CopyWorld, state: Step) -> None:
        for rank in range(self.bounds.hosts):
            domains = {
                self._hosts[i].domain(self.bounds.level)
                for i in range(len(self._hosts))
                for owner, slots in w.memory[i]
                if owner % self.bounds.hosts == rank and _complete(slots, state)
            }
            if len(domains) < self.bounds.copies:
                raise Violation(f"not apart: the shard of rank {rank} of {state} is in {sorted(domains)} alone")

    def _lose(self, w: CopyWorld, gone: list[int]) -> CopyWorld:
        """Hosts are lost with their memory. All ranks of their replicas end."""
        down = {i // self.bounds.hosts for i in gone}
        dead = {i for r in down for i in self._ranks(r)}
        for holder, owner, state in w.pulls:
            if holder in gone and owner not in gone:
                w = _with(w, owner, owner, _read(_slots(w, owner, owner), state, -1))
            if owner in gone and holder not in gone:
                w = _with(w, holder, owner, _abandon(_slots(w, holder, owner)))
        pulls = frozenset(pull for pull in w.pulls if pull[0] not in gone and pull[1] not in gone)
        healthy = tuple(healthy and r not in down for r, healthy in enumerate(w.healthy))
        return w._replace(
            live=tuple(None if i in dead else live for i, live in enumerate(w.live)),
            votes=(None,) * len(w.votes),  # a new epoch: who votes again looks at its copies again
            skipped=tuple(skipped and i not in dead for i, skipped in enumerate(w.skipped)),
            memory=tuple(() if i in gone else memory for i, memory in enumerate(w.memory)),
            pulls=pulls,
            healthy=healthy,
            lost=w.lost + 1,
            calm=-1,
            losses=w.losses - 1,
        )

    def _return(self, w: CopyWorld, replica: int) -> CopyWorld:
        """A replica has new hosts for those that it lost, and has fetched the state of the others."""
        ranks = self._ranks(replica)
        live = tuple(w.head if i in ranks else live for i, live in enumerate(w.live))
        return w._replace(live=live, votes=(None,) * len(w.votes), calm=-1)

    def _restore(self, w: CopyWorld) -> CopyWorld:
        """No rank has a state: all replicas begin with the newest one that is in memory."""
        paths = [str(host) for host in self._hosts]
        rows = [
            Holding(
                _state(state),
                owner // self.bounds.hosts,
                owner % self.bounds.hosts,
                self.bounds.hosts,
                "",
                paths[i],
                "",
                settled,
            )
            for i, memory in enumerate(w.memory)
            for owner, slots in memory
            for phase, state, _, settled, _, _ in slots
            if phase == SlotPhase.COMPLETE.value and state is not None
        ]
        found = newest(rows, 0, self._layouts, paths[: self.bounds.hosts])
        state = (found.state.commit_epoch, found.state.step) if found is not None else INITIAL
        if w.lost < self.bounds.copies and state < w.protected:
            raise Violation(f"lost: {w.protected} was kept, {state} is what {w.lost} losses have left")
        if found is not None and any(source.state != found.state for shard in found.sources for source in shard):
            raise Violation(f"mixed: {found}")
        if state > w.head:
            raise Violation(f"from nowhere: {state} was restored, {w.head} was the newest committed one")
        n = len(self._hosts)
        return w._replace(
            head=state,
            epoch=w.epoch + 1,
            live=(state,) * n,
            votes=(None,) * n,
            skipped=(False,) * n,
            healthy=(True,) * self.bounds.replicas,
            settled=(False,) * self.bounds.replicas,
            owed=((),) * n,
            protected=min(w.protected, state),
            calm=-1,
        )


def _state(step: Step) -> StateId:
    return StateId(*step, "")


def _set(values: tuple, at: int, value: object) -> tuple:
    return (*values[:at], value, *values[at + 1 :])


def _slots(w: CopyWorld, host: int, owner: int) -> Frozen:
    return next((slots for each, slots in w.memory[host] if each == owner), ())


def _with(w: CopyWorld, host: int, owner: int, slots: Frozen) -> CopyWorld:
    others = [each for each in w.memory[host] if each[0] != owner]
    return w._replace(memory=_set(w.memory, host, tuple(sorted([*others, (owner, slots)]))))


def _has(w: CopyWorld, host: int, owner: int, state: Step) -> bool:
    return _complete(_slots(w, host, owner), state)


def _complete(slots: Frozen, state: Step) -> bool:
    return any(slot[:2] == (SlotPhase.COMPLETE.value, state) for slot in slots)


class _Slots(SnapshotSlots):
    """The slots of production, made from a value and turned into one."""

    def __init__(self, frozen: Frozen) -> None:
        super().__init__()
        for phase, state, order, settled, passed, readers in frozen:
            slot = self._slots[self.add()]
            slot.phase, slot.state, slot.order = SlotPhase(phase), _state(state) if state else None, order
            slot.settled, slot.passed, slot.readers = settled, passed, readers
        self._completed = len(frozen)

    @property
    def frozen(self) -> Frozen:
        """The slots as a value that is the same for slots that behave alike."""
        order = {slot.number: place for place, slot in enumerate(reversed(self._complete()), 1)}
        return tuple(
            sorted(
                (
                    slot.phase.value,
                    (slot.state.commit_epoch, slot.state.step) if slot.state else None,
                    order.get(slot.number, 0),
                    slot.settled,
                    slot.passed,
                    slot.readers,
                )
                for slot in self._slots.values()
            )
        )


@lru_cache
def _stage(frozen: Frozen, state: Step, most: int) -> Frozen | None:
    """Return the slots with one in which `state` is written, or None if there is no place for it."""
    slots = _Slots(frozen)
    if slots.stage(_state(state), 0.0) is None:
        if len(frozen) >= most:
            return None
        slots.add()
        if slots.stage(_state(state), 0.0) is None:
            return None
    return slots.frozen


@lru_cache
def _staged(frozen: Frozen, state: Step) -> Frozen:
    slots = _Slots(frozen)
    slots.staged(_state(state))
    return slots.frozen


@lru_cache
def _read(frozen: Frozen, state: Step, more: int) -> Frozen:
    """Return the slots with one reader of `state` more or less."""
    slots = _Slots(frozen)
    number = slots.find(_state(state))
    assert number is not None
    if more > 0:
        slots.borrow(number)
    else:
        slots.give_back(number)
    return slots.frozen


@lru_cache
def _settle(frozen: Frozen, state: Step, everywhere: bool) -> Frozen:
    slots = _Slots(frozen)
    slots.mark_settled(_state(state), everywhere)
    return slots.frozen


@lru_cache
def _abandon(frozen: Frozen) -> Frozen:
    slots = _Slots(frozen)
    slots.abandon(reuse=True)
    return slots.frozen


def main() -> None:
    """Explore with the default bounds and print what was found."""
    sys.stdout.write(f"{search(CopySpace(CopyBounds()), limit_s=600)}\n")


if __name__ == "__main__":
    main()
