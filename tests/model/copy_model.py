"""How the hosts of a job and their memory change when something happens; the properties are checked on the way.

What decides is the product's own code: `memory.copies` says who keeps which copy and where it moves if its holder
refuses it, `memory.replacement` which spare host takes whose place and whether the ranks that check in are one
gang, `SnapshotSlots` which memory is written, `memory.recovery` what is restored, and `CopyInterval` which states
are copied.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import cache

from ft_hsdp.memory.copies import Copy, MemberHosts, Plan, Refusal, missing_copies, move_refused
from ft_hsdp.memory.recovery import Holding, newest
from ft_hsdp.memory.replacement import RankClaim, assign, disagreement
from ft_hsdp.memory.schedule import CopyInterval
from ft_hsdp.state.agent.slots import SlotPhase
from tests.model.copy_world import (
    INITIAL,
    CopyBounds,
    CopyWorld,
    Step,
    abandon,
    complete,
    first,
    has,
    hosts_of,
    put,
    read,
    settle,
    slots_of,
    stage,
    staged,
    state_id,
    with_slots,
)
from tests.model.invariants import Violation


class CopyModel:
    """The worlds under `bounds`, and what each happening makes of them."""

    def __init__(self, bounds: CopyBounds) -> None:
        self.bounds = bounds
        self._hosts = hosts_of(bounds)
        self._number = {host.name: i for i, host in enumerate(self._hosts)}
        self._layouts = [""] * bounds.hosts
        self._interval = CopyInterval.of(bounds.every)
        self._plan_of = cache(self.planned)

    def initial(self) -> CopyWorld:
        """Return the first world: all replicas have the initial state."""
        return first(self.bounds)

    def finished(self, w: CopyWorld) -> bool:
        """Return whether all replicas have the final state."""
        return w.head[1] == self.bounds.steps and all(live == w.head for live in w.live)

    # What is there.

    def ranks(self, replica: int) -> range:
        return range(replica * self.bounds.hosts, (replica + 1) * self.bounds.hosts)

    def plan(self, w: CopyWorld) -> Plan:
        """Return which copies the hosts of the present epoch make."""
        return self._plan_of(w.healthy, tuple(live is not None for live in w.live), w.places, w.told)

    def owners(self, plan: Plan, host: int) -> list[int]:
        """Return the ranks whose shards a host has to keep."""
        return sorted(map(self.number, plan.kept_by(self._hosts[host].name)))

    def number(self, copy: Copy) -> int:
        """Return the rank whose shard a copy is of, by number."""
        return copy.replica * self.bounds.hosts + copy.rank

    def is_copied(self, w: CopyWorld, plan: Plan, state: Step) -> bool:
        """Return whether copies of a state are made, which its votes wait for."""
        return not plan.copies or self._interval.due(state[1]) or state == w.base

    def is_told(self, w: CopyWorld, plan: Plan, state: Step) -> bool:
        """Return whether the commit after a state says if it is kept."""
        return self.is_copied(w, plan, state)

    def waits(self, w: CopyWorld, i: int) -> bool:
        """Return whether a rank has or has left out its snapshot, and has not voted."""
        live = w.live[i]
        done = live is not None and (w.skipped[i] or has(w, w.places[i], i, live))
        return done and w.votes[i] is None and w.healthy[i // self.bounds.hosts]

    def planned(
        self,
        healthy: tuple[bool, ...],
        alive: tuple[bool, ...],
        places: tuple[int, ...],
        told: tuple[tuple[tuple[int, int], ...], ...],
    ) -> Plan:
        members = [
            MemberHosts(r, tuple(self._hosts[places[i]] for i in self.ranks(r)), healthy[r])
            for r in range(self.bounds.replicas)
            if all(alive[i] for i in self.ranks(r))
        ]
        plan = missing_copies(members, self.bounds.copies, self.bounds.level)
        for pairs in told:
            refusals = [
                Refusal(*divmod(owner, self.bounds.hosts), self._hosts[host].name) for owner, host in pairs
            ]
            for count in range(1, len(refusals) + 1):
                plan = move_refused(members, plan, self.bounds.level, refusals[:count])
        return plan

    def _keepable(self, w: CopyWorld, plan: Plan) -> bool:
        """Return whether the hosts can keep a state in all promised places."""
        return not plan.unprotected and not any(
            (self.number(copy), self._number[copy.holder.name]) in w.refusing and not self._can_move(w, plan, copy)
            for copy in plan.copies
        )

    def _can_move(self, w: CopyWorld, plan: Plan, refused: Copy) -> bool:
        """Return whether a copy of a host of the owner's replica can be on another one of them."""
        owner, level = self.number(refused), self.bounds.level
        others = [copy.holder for copy in plan.copies if self.number(copy) == owner and copy != refused]
        whole = [
            self._hosts[w.places[r * self.bounds.hosts + refused.rank]] for r, well in enumerate(w.healthy) if well
        ]
        taken = {host.domain(level) for host in others + whole}
        own = [w.places[i] for i in self.ranks(refused.replica)]
        return self._number[refused.holder.name] in own and any(
            (owner, i) not in w.refusing and self._hosts[i].domain(level) not in taken for i in own
        )

    # Snapshots, copies and commits.

    def snapshot(self, w: CopyWorld, i: int, state: Step) -> CopyWorld:
        """A rank copies its shard into the memory of its host, if there is a slot for it."""
        written = stage(slots_of(w, w.places[i], i), state, self.bounds.own_slots)
        if written is None:
            calm = w.calm if self.bounds.own_slots > 2 else -1
            return w._replace(skipped=put(w.skipped, i, True), calm=calm)
        return with_slots(w, w.places[i], i, staged(written, state))

    def skip(self, w: CopyWorld, i: int) -> CopyWorld:
        return w._replace(skipped=put(w.skipped, i, True), skips=w.skips - 1, calm=-1, whole=INITIAL)

    def vote(self, w: CopyWorld, i: int, kept: bool, refused: Iterable[tuple[int, int]]) -> CopyWorld:
        """A rank says whether its host has all that it has to keep, and which shards of its replica it refuses."""
        named = frozenset(pair for pair in refused if pair[0] // self.bounds.hosts == i // self.bounds.hosts)
        return w._replace(votes=put(w.votes, i, kept), named=w.named | named if named and not kept else w.named)

    def hurry(self, w: CopyWorld, i: int) -> CopyWorld:
        """A rank votes without the copies that its host has to keep."""
        return w._replace(votes=put(w.votes, i, False), calm=-1, whole=INITIAL)

    def pull(self, w: CopyWorld, holder: int, owner: int, state: Step) -> CopyWorld:
        """A host begins to copy a shard. A copy that it was making of an older state of it is given up."""
        for older in [pull for pull in w.pulls if pull[:2] == (holder, owner)]:
            w = self._give_up(w, *older)
        written = stage(slots_of(w, holder, owner), state, self.bounds.slots)
        if written is None:
            raise Violation(f"no slot: {self._hosts[holder].name} has none for a copy of {state}")
        w = with_slots(w, holder, owner, written)
        w = self._read(w, owner, state, 1)
        return w._replace(pulls=w.pulls | {(holder, owner, state)})

    def pulled(self, w: CopyWorld, holder: int, owner: int, state: Step) -> CopyWorld:
        w = with_slots(w, holder, owner, staged(slots_of(w, holder, owner), state))
        w = self._read(w, owner, state, -1)
        return w._replace(pulls=w.pulls - {(holder, owner, state)})

    def refuse(self, w: CopyWorld, holder: int, owner: int) -> CopyWorld:
        """A host has no room for a shard any more, until the host itself is lost."""
        return w._replace(refusing=w.refusing | {(owner, holder)}, refusals=w.refusals - 1, calm=min(w.calm, 0))

    def hear(self, w: CopyWorld, i: int) -> CopyWorld:
        """A rank applies the newest step, and tells its agent whether the state before it is kept everywhere.

        If it is, the agent frees the copies that the plan of that vote does not name.
        """
        before, settled, host = w.live[i], w.settled[i // self.bounds.hosts], w.places[i]
        assert before is not None
        for owner, slots in w.memory[host]:
            w = with_slots(w, host, owner, settle(slots, before, settled))
            if settled and owner != i and owner not in w.owed[host]:
                w = self._free(w, host, owner)
        return w._replace(live=put(w.live, i, w.head), skipped=put(w.skipped, i, False))

    def commit(self, w: CopyWorld, voting: list[int], plan: Plan) -> CopyWorld:
        """A step is committed. Its commit says whether the state before it is kept in all promised places."""
        told = self.is_told(w, plan, w.head)
        everywhere = all(w.votes[i] for i in voting)
        settled = tuple(
            bool(w.healthy[r]) and all(w.votes[i] for i in self.ranks(r)) if told else None
            for r in range(self.bounds.replicas)
        )
        calm = min(2, w.calm + 1) if told else w.calm
        protected, lost = w.protected, w.lost
        keepable = self._keepable(w, plan)
        if told and everywhere and not plan.unprotected:
            protected, lost = w.head, 0
            self._is_apart(w, w.head)
        elif told and w.calm >= 1 and keepable:
            raise Violation(f"not protected: {w.head} is not kept, and nothing went wrong since the last commit")
        if calm == 2 and keepable and w.head[1] - protected[1] >= self.bounds.every:
            raise Violation(f"too seldom: {protected} is the newest state that is kept at {w.head}")
        here = [i for i, live in enumerate(w.live) if live is not None]
        head = (w.epoch, w.head[1] + 1)
        healthy = tuple(all(i in here for i in self.ranks(r)) for r in range(self.bounds.replicas))
        own = everywhere if told else not any(w.skipped[i] for i in voting)
        return w._replace(
            head=head,
            votes=(None,) * len(w.votes),
            named=frozenset(),
            told=self._told(w),
            healthy=healthy,
            base=self._base(w, head if healthy != w.healthy else w.base),
            settled=settled,
            owed=tuple(tuple(self.owners(plan, host)) for host in range(len(self._hosts))),
            protected=protected,
            lost=lost,
            whole=w.head if own and self.bounds.crashes else w.whole,
            top=max(w.top, head) if self.bounds.partitions else w.top,
            calm=calm,
        )

    def _told(self, w: CopyWorld) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return which refused copies each replica knows after a commit: also what its ranks' votes named."""
        if not w.named:
            return w.told
        return tuple(
            told + tuple(sorted(pair for pair in w.named - {*told} if pair[0] in self.ranks(r)))
            for r, told in enumerate(w.told)
        )

    def _base(self, w: CopyWorld, state: Step) -> Step:
        return state if self.bounds.every > 1 else w.base

    def _read(self, w: CopyWorld, owner: int, state: Step, more: int) -> CopyWorld:
        host = w.places[owner]
        return with_slots(w, host, owner, read(slots_of(w, host, owner), state, more))

    def _give_up(self, w: CopyWorld, holder: int, owner: int, state: Step) -> CopyWorld:
        """A host copies a shard no longer."""
        w = with_slots(w, holder, owner, abandon(slots_of(w, holder, owner)))
        return self._read(w, owner, state, -1)._replace(pulls=w.pulls - {(holder, owner, state)})

    def _free(self, w: CopyWorld, holder: int, owner: int) -> CopyWorld:
        """An agent drops the copies of a shard, and gives up what it copies of it."""
        for pull in [pull for pull in w.pulls if pull[:2] == (holder, owner)]:
            w = self._give_up(w, *pull)
        kept = tuple(each for each in w.memory[holder] if each[0] != owner)
        return w._replace(memory=put(w.memory, holder, kept))

    def _is_apart(self, w: CopyWorld, state: Step) -> None:
        for rank in range(self.bounds.hosts):
            domains = {
                self._hosts[i].domain(self.bounds.level)
                for i in range(len(self._hosts))
                for owner, slots in w.memory[i]
                if owner % self.bounds.hosts == rank and complete(slots, state)
            }
            if len(domains) < self.bounds.copies:
                raise Violation(f"not apart: the shard of rank {rank} of {state} is in {sorted(domains)} alone")

    # Losses.

    def lose(self, w: CopyWorld, gone: Collection[int], *, cut_off: bool = False) -> CopyWorld:
        """Hosts are lost with their memory, or cut off with it. All ranks of their replicas end."""
        for holder, owner, state in w.pulls:
            if holder in gone or w.places[owner] in gone:
                w = self._give_up(w, holder, owner, state)
        down = {i // self.bounds.hosts for i, host in enumerate(w.places) if host in gone}
        aside = dict(w.aside) | ({host: w.memory[host] for host in gone} if cut_off else {})
        w = w._replace(
            memory=tuple(() if i in gone else memory for i, memory in enumerate(w.memory)),
            down=w.down | frozenset(gone),
            refusing=frozenset(pair for pair in w.refusing if pair[1] not in gone),
            aside=tuple(sorted(aside.items())),
            lost=w.lost + 1,
            whole=INITIAL,
            calm=-1,
            losses=w.losses - (not cut_off),
            partitions=w.partitions - cut_off,
        )
        return self._end(w, down) if down else w

    def crash(self, w: CopyWorld, replica: int) -> CopyWorld:
        """All ranks of a replica end. Their hosts keep what is in memory."""
        return self._end(w._replace(crashes=w.crashes - 1, calm=-1), {replica})

    def come_back(self, w: CopyWorld, host: int) -> CopyWorld:
        """A host is there again, with what was in its memory if it was cut off."""
        aside = dict(w.aside)
        memory = put(w.memory, host, aside.pop(host, ()))
        return w._replace(memory=memory, down=w.down - {host}, aside=tuple(sorted(aside.items())))

    def _end(self, w: CopyWorld, replicas: Collection[int]) -> CopyWorld:
        dead = {i for r in replicas for i in self.ranks(r)}
        return w._replace(
            live=tuple(None if i in dead else live for i, live in enumerate(w.live)),
            votes=(None,) * len(w.votes),  # a new epoch: who votes again looks at its copies again
            named=frozenset(),
            told=tuple(() if r in replicas else told for r, told in enumerate(w.told)),
            skipped=tuple(skipped and i not in dead for i, skipped in enumerate(w.skipped)),
            healthy=tuple(healthy and r not in replicas for r, healthy in enumerate(w.healthy)),
            base=self._base(w, w.head),
        )

    # Starts.

    def rejoin(self, w: CopyWorld, replica: int) -> CopyWorld:
        """A replica has hosts for those that it lost, and has fetched the state of the others."""
        w = self._place(w, [replica])
        self._check_in(self._claims(w, replica, w.head))
        ranks = self.ranks(replica)
        live = tuple(w.head if i in ranks else live for i, live in enumerate(w.live))
        base = self._base(w, w.head)
        return w._replace(live=live, votes=(None,) * len(w.votes), named=frozenset(), base=base, calm=-1)

    def restore(self, w: CopyWorld) -> CopyWorld:
        """No rank has a state: all replicas begin with the newest one that is in memory."""
        w = self._place(w, range(self.bounds.replicas))
        state = self._restored(w)
        if w.lost < self.bounds.copies and state < w.protected:
            raise Violation(f"lost: {w.protected} was kept, {state} is what {w.lost} losses have left")
        if state < w.whole:
            raise Violation(f"thrown away: all hosts had {w.whole}, {state} is what they have now")
        if state > (w.top if self.bounds.partitions else w.head):
            raise Violation(f"from nowhere: {state} was restored, {w.head} was the newest committed one")
        for replica in range(self.bounds.replicas):
            self._check_in(self._claims(w, replica, state))
        n = len(w.places)
        return w._replace(
            head=state,
            epoch=w.epoch + 1,
            live=(state,) * n,
            votes=(None,) * n,
            skipped=(False,) * n,
            healthy=(True,) * self.bounds.replicas,
            base=self._base(w, state),
            settled=(False,) * self.bounds.replicas,
            owed=((),) * len(self._hosts),
            protected=min(w.protected, state),
            whole=min(w.whole, state),
            calm=-1,
        )

    def stray(self, w: CopyWorld, replica: int, seat: int, claim: RankClaim) -> CopyWorld:
        """A process checks in with a gang that it is not of, in the place of a rank: that start ends."""
        claims = self._claims(self._place(w, [replica]), replica, w.head)
        claims[seat] = claim
        self._check_in(claims)
        return w._replace(strays=w.strays - 1, calm=-1)

    def strays(self, w: CopyWorld, replica: int) -> Iterable[tuple[str, int, RankClaim]]:
        """Yield which processes may check in with a replica: what happens, the place, and what they claim."""
        claims = self._claims(self._place(w, [replica]), replica, w.head)
        before = self._claims(w, replica, w.head, life="0")
        for rank, old in enumerate(before):
            yield f"rank {rank} of an earlier start checks in with replica {replica}", rank, old
        for seat, rank in ((0, 1), (1, 0)) if len(claims) > 1 else ():
            told = f"rank {rank} checks in a second time with replica {replica}, in the place of rank {seat}"
            yield told, seat, claims[rank]

    def _place(self, w: CopyWorld, replicas: Collection[int]) -> CopyWorld:
        """Spare hosts take the places of lost ones. If there are too few, the lost ones come back."""
        hosts, taken = self._hosts, {w.places[i] for r in range(self.bounds.replicas) for i in self.ranks(r)}
        spares = [host for i, host in enumerate(hosts) if i not in taken and i not in w.down]
        assigned = assign(
            {r: [hosts[w.places[i]] for i in self.ranks(r)] for r in replicas},
            {hosts[i].name for i in w.down},
            spares,
            self.bounds.level,
        )
        places = list(w.places)
        for replica, found in assigned.items():
            for i, host in zip(self.ranks(replica), found.hosts, strict=True):
                places[i] = self._number[host.name]
            for position in found.missing:
                w = self.come_back(w, places[self.ranks(replica)[position]])
        if len(set(places)) < len(places) or w.down & {places[i] for r in replicas for i in self.ranks(r)}:
            where = [hosts[i].name for i in places]
            raise Violation(f"misplaced: the ranks are on {where}, and {[hosts[i].name for i in w.down]} are lost")
        return w._replace(places=tuple(places))

    def _claims(self, w: CopyWorld, replica: int, state: Step, life: str = "1") -> list[RankClaim]:
        """Return what the ranks of a replica say of themselves when they check in."""
        names = tuple(self._hosts[w.places[i]].name for i in self.ranks(replica))
        return [
            RankClaim(rank, len(names), f"{replica}-a-{life}", name, names, state_id(state))
            for rank, name in enumerate(names)
        ]

    def _check_in(self, claims: Sequence[RankClaim]) -> None:
        """If the product lets these ranks train, they must be one gang with one rank for each shard."""
        if disagreement(claims):
            return
        one = claims[0]
        for claim in claims:
            alike = (claim.incarnation, claim.hosts, claim.state) == (one.incarnation, one.hosts, one.state)
            if not alike or claim.host != claim.hosts[claim.rank]:
                raise Violation(
                    f"two gangs: rank {claim.rank} of {claim.incarnation} trains with {one.incarnation}"
                )
        if [claim.rank for claim in claims] != list(range(self.bounds.hosts)):
            raise Violation(f"no gang: its shards are those of ranks {[claim.rank for claim in claims]}")

    def _restored(self, w: CopyWorld) -> Step:
        """Return the newest state that the hosts have together."""
        paths = [str(host) for host in self._hosts]
        rows = [
            Holding(
                state_id(state),
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
            for phase, state, _, settled, *_ in slots
            if phase == SlotPhase.COMPLETE.value and state is not None
        ]
        found = newest(rows, 0, self._layouts, [paths[w.places[i]] for i in self.ranks(0)])
        if found is None:
            return INITIAL
        if any(source.state != found.state for shard in found.sources for source in shard):
            raise Violation(f"mixed: {found}")
        return found.state.commit_epoch, found.state.step
