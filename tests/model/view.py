"""What can be seen of a world: its cores, what they hold, and what follows from it.

`Model` adds what happens.
"""

from collections.abc import Sequence
from dataclasses import replace

from ft_hsdp.core import effects, events, state_id
from ft_hsdp.core import replica as core
from ft_hsdp.core.commit import CommitRecord, CommitToken, Contribution
from ft_hsdp.core.grant import Finish, Refused
from ft_hsdp.core.replica_state import Phase, Replica
from lighthouse.quorum import events as quorum_events
from lighthouse.quorum import state as quorum
from lighthouse.quorum import transition
from tests.model import invariants
from tests.model.world import Bounds, Content, Cores, Interned, World, edges, place_of, severed, weight, width_of


class ModelView:
    """The worlds under `bounds`, with the states of their cores, each kept once."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._shards = 1 if bounds.units.shared else bounds.replicas
        self._units = replace(bounds.units, replicas=bounds.replicas, data_ranks=bounds.ranks)
        units = bounds.replicas * bounds.units.accumulate * max(1, bounds.ranks)
        self._holes = bounds.units.shared * units * (1 + bounds.deaths + bounds.losses)
        self.cores: Cores[Replica, events.Event, effects.Effect] = Cores(core.transition)
        self.quorums: Cores[quorum.LighthouseState, quorum_events.Event, quorum_events.Effect] = Cores(
            transition.transition
        )
        self._contents: Interned[Content] = Interned()
        self._wait: set[tuple[int, bool]] = set()

    # What is there.

    def replica(self, w: World, r: int) -> Replica | None:
        """Return the core of replica `r`; None while it is dead."""
        return None if w.replicas[r] < 0 else self.cores.items[w.replicas[r]]

    def lighthouse(self, w: World) -> quorum.LighthouseState:
        return self.quorums.items[w.lighthouse]

    def sum(self, w: World, me: Replica) -> CommitRecord | None:
        """Return the reduced gradient of the attempt of `me`, once every member has brought its own.

        None before.
        """
        assert me.grant is not None
        all_entries = dict(w.rings).get(me.fence, ())
        ours = [e for e in all_entries if e.term == me.grant.term]  # a ring forms among those of one grant only
        entries = [e for e in ours if me.grant.member(e.replica, e.incarnation)]
        if {e.replica for e in entries} != set(me.grant.ring) or len({e.prev for e in entries}) != 1:
            return None
        if any(severed(self.bounds, w, edge) for edge in edges(me.grant)):
            return None
        runs = ((e.replica, run) for e in sorted(entries) for run in e.runs)
        f, grant = me.fence, me.grant
        fewer = grant.narrower(self.bounds.ranks)
        parts = tuple(
            Contribution(r, weight(run), run[0], run[1], units=run[2], width=fewer.get(r, 0)) for r, run in runs
        )
        return CommitRecord(
            *(f.epoch, f.attempt, f.step, me.ring_state.lineage, grant.ring, grant.total, parts, "sum"),
            wanted=grant.units,
            ring_widths=grant.widths,
        )

    def halted(self, w: World) -> bool:
        """Return whether the lighthouse has given the job up: no copy of the head is left, or replicas differ."""
        return any(isinstance(a, Refused) and a.reason == self.lighthouse(w).halted for a in w.answers)

    def finished(self, w: World) -> bool:
        """Return whether all replicas ended at one final state, or the job was given up."""
        corrupt = any(self._flipped(w, r) for r in range(len(w.replicas)))
        return self.halted(w) or (
            not corrupt and invariants.ended_together(self.held(w), self._replicas(w), w.late, self.bounds.steps)
        )

    def look(self, w: World) -> World:
        """Return `w` after a check that no replica waits for nothing; raise Violation if one does."""
        for r, core_id in enumerate(w.replicas):
            asks = w.asked[r] is not None or w.answers[r] is not None
            if core_id < 0 or (core_id, asks) in self._wait:
                continue
            invariants.waits_for_something(r, self.cores.items[core_id], asks)
            self._wait.add((core_id, asks))
        return w

    def _replicas(self, w: World) -> Sequence[Replica | None]:
        return [self.replica(w, r) for r in range(len(w.replicas))]

    def _sound(self, w: World) -> Sequence[Replica | None]:
        return [None if self._flipped(w, r) else me for r, me in enumerate(self._replicas(w))]

    def held(self, w: World) -> Sequence[Content]:
        return [self._contents.items[c] for c in w.content]

    def _over(self, w: World) -> bool:
        """Return whether the job has ended: a replica has been told so, or is about to be."""
        told = any(isinstance(a, Finish) for a in w.answers)
        ended = any(m and m.phase is Phase.DONE and m.state.step == self.bounds.steps for m in self._replicas(w))
        return self.lighthouse(w).finished or told or ended

    def waits(self, me: Replica) -> bool:
        """Return whether `me` holds its vote back until its fetch is done."""
        return self.bounds.patient and me.fetching is not None

    def _flipped(self, w: World, r: int) -> bool:
        return any((f.replica, f.life) == (r, w.lives[r]) for f in w.flipped)

    def _born(self, r: int, incarnation: str, found: state_id.StateId | None = None) -> int:
        state = found or state_id.initial("model", "weights")
        return self.cores.id(Replica(r, incarnation, self.bounds.steps, state, state))

    def _leaves(self, w: World, r: int) -> bool:
        """Return whether replica `r` ends before the job does, because it was drained or told to end."""
        me = self.replica(w, r)
        if me is None or me.state.step >= self.bounds.steps:
            return False
        return me.departing or me.me in self.lighthouse(w).drained

    @staticmethod
    def _of_another_grant(me: Replica, peer: Replica) -> bool:
        """Return whether `peer` has another grant of the same epoch: then the two cannot connect."""
        mine, theirs = me.grant, peer.grant
        return mine is not None and theirs is not None and mine.epoch == theirs.epoch and mine != theirs

    def _stale(self, w: World, item: tuple[int, CommitToken]) -> bool:
        """Return whether a token can never count again where it is going."""
        me = self.replica(w, item[0])
        return me is None or me.grant is None or me.grant.epoch > item[1].fence.epoch or not me.intact

    def _has(self, w: World, member: tuple[int, str], state: state_id.StateId) -> bool:
        """Return whether an incarnation holds `state` or is prepared for it."""
        place = place_of(w, member)
        me = None if place is None else self.replica(w, place)
        if me is None:
            return False
        return any(state_id.same(s, state) for s in (me.state, me.prepared and me.prepared.state_id) if s)

    def _widths(self, w: World, record: CommitRecord) -> dict[int, int]:
        """Return how many ranks the members of a record's epoch really have; {} if that is not known any more."""
        return {member[0]: width_of(w, member) for member in self._members(w, record.epoch)} if w.widths else {}

    def _members(self, w: World, epoch: int) -> frozenset[tuple[int, str]]:
        named = (e.members for e in self.lighthouse(w).epochs if e.number == epoch)
        return frozenset(next(named, ()))
