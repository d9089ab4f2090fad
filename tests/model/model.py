"""How a world changes when one of its cores takes an event and the effects happen.

The cores are the production ones. Safety properties are checked where they could break: at each commit, at each
fetch and at each word of the lighthouse.
"""

from dataclasses import replace

from ft_hsdp.core import effects, events, state_id
from ft_hsdp.core.commit import CommitRecord, CommitToken
from ft_hsdp.core.grant import Continue
from ft_hsdp.core.ledger import Run
from ft_hsdp.core.replica_state import Phase
from ft_hsdp.core.units import Places, head, size
from ft_hsdp.core.voting import LEFT
from lighthouse.quorum import events as quorum_events
from lighthouse.quorum import state as quorum
from tests.model import invariants, lies
from tests.model.view import ModelView
from tests.model.world import (
    SECOND_RUN,
    CommitSeen,
    Content,
    Flip,
    Kept,
    Running,
    World,
    WorldEntry,
    first,
    ledger,
    name_at,
    named,
    place_of,
    put,
    replica_at,
    same_run,
    width_of,
)

GRACE_S, EVICT_S = 1.0, 10.0


class Model(ModelView):
    """How worlds change. Each transition of a core is computed once."""

    def initial(self) -> World:
        """Return the world in which all replicas are warm and have asked; the lighthouse is empty."""
        b = self.bounds
        policy = quorum.Policy(
            b.replicas,
            b.steps,
            min_replicas=b.min_replicas,
            silence_grace_s=GRACE_S,
            evict_s=EVICT_S,
            units=self._units,
        )
        born = tuple(self._born(r, named(r, 0)) for r in range(b.replicas))
        lighthouse = self.quorums.id(quorum.LighthouseState.empty(policy, 1))
        world = first(b, born, self._contents.id(()), lighthouse)
        for r in range(b.replicas):
            world = self.tell(world, r, events.Started())
        return world

    # What happens to a replica.

    def tell(self, w: World, r: int, event: events.Event) -> World:
        """Return the world after replica `r` takes an event and its effects happen."""
        if w.replicas[r] < 0:
            return w
        after, due = self.cores.after(w.replicas[r], event)
        w = w._replace(replicas=put(w.replicas, r, after))
        for effect in due:
            w = self._apply(w, r, event, effect)
        return w

    def hand_over(self, w: World, to: int, token: CommitToken) -> World:
        """Return the world after a token arrives.

        Holding the sum has no effect without it, so both are one action here.
        """
        w = self.tell(w, to, events.TokenArrived(token))
        me = self.replica(w, to)
        return w if me is None or self.waits(me) else self.vote(w, to)

    def vote(self, w: World, r: int) -> World:
        """Return the world after replica `r` votes, if it holds a token and the sum."""
        me = self.replica(w, r)
        if me is not None and me.phase is Phase.REDUCING and me.token and (record := self.sum(w, me)):
            w = self.reduced(w, r, record)
        return w

    def reduced(self, w: World, r: int, record: CommitRecord) -> World:
        """Return the world after replica `r` holds the sum and votes. All of its state is compared at once."""
        brought = ((e.replica, run) for e in dict(w.rings)[record.fence] for run in e.runs)
        invariants.counts_what_was_brought(r, record, brought)
        if w.widths:
            ring = dict(w.rings)[record.fence]
            invariants.cut_alike({e.replica: (width_of(w, (e.replica, e.incarnation)), e.widths) for e in ring})
        digest = ("corrupt" if self._flipped(w, r) else "sound") if self.bounds.flips else ""
        return self.tell(w, r, events.Reduced(record.fence, record, digest))

    def answer(self, w: World, r: int) -> World:
        """Return the world after the answer that is on its way to replica `r` arrives."""
        answer = w.answers[r]
        assert answer is not None
        return self.tell(w._replace(answers=put(w.answers, r, None)), r, events.Answered(answer))

    def fetch(self, w: World, r: int, base: state_id.StateId, donor: int) -> World:
        """Return the world after replica `r` gets `base` from `donor`."""
        content = self._contents.items[w.content[donor]][: base.step]
        w = self._hold(w, r, base, content)
        invariants.agreement(r, base, self.held(w), self._replicas(w))
        return self.vote(self.tell(w, r, events.Fetched(base)), r)

    def flip(self, w: World, r: int) -> World:
        """Return the world after the state of replica `r` changes silently."""
        flip = Flip(r, w.lives[r], len(self._contents.items[w.content[r]]))
        return w._replace(flipped=w.flipped | {flip}, flips=w.flips - 1)

    def die(self, w: World, r: int) -> World:
        """Return the world after replica `r` is gone with all that it held except its snapshots.

        No other is told.
        """
        me = self.replica(w, r)
        assert me is not None
        return w._replace(
            late=w.late | {r} if replica_at(w, r) in self.lighthouse(w).drained else w.late,
            replicas=put(w.replicas, r, -1),
            content=put(w.content, r, self._contents.id(())),
            trained=put(w.trained, r, ()),
            asked=put(w.asked, r, None),
            answers=put(w.answers, r, None),
            tokens=tuple(t for t in w.tokens if t[0] != r),
            exits=w.exits if r in w.torn else tuple(sorted((*w.exits, (me.me, me.incarnation)))),
            growing=w.growing - {r},
            torn=w.torn - {r},
            exiled=w.exiled - (w.torn & {r}),
        )

    def tear(self, w: World, r: int) -> World:
        """Return the world after replica `r` has lost a rank, and its leader is cut off from the lighthouse.

        It is to count as exited: it votes no more, but may still commit what it voted for before.
        """
        me = self.replica(w, r)
        assert me is not None
        exits = tuple(sorted((*w.exits, (me.me, me.incarnation))))
        return w._replace(tears=w.tears - 1, torn=w.torn | {r}, exiled=w.exiled | {r}, exits=exits)

    def lose_host(self, w: World, r: int) -> World:
        """Return the world after replica `r` loses a host, and no spare is there.

        All its ranks end, if they run. It will go on with those that are left. A snapshot lacks the lost shard
        then, unless another replica or another host has it.
        """
        w = w._replace(losses=w.losses - 1, left=put(w.left, r, w.left[r] - 1))
        if not self.bounds.copied:
            elsewhere = {snapshot for other, kept in enumerate(w.kept) if other != r for snapshot in kept}
            w = w._replace(kept=put(w.kept, r, tuple(s for s in w.kept[r] if s in elsewhere)))
        return w if self.replica(w, r) is None else self.die(w, r)

    def get_host(self, w: World, r: int) -> World:
        """Return the world after replica `r` gets a host back: its next life has one rank more.

        If it runs, it is told to end.
        """
        w = w._replace(returns=w.returns - 1, left=put(w.left, r, w.left[r] + 1))
        if self.replica(w, r) is None:
            return w
        return self.tell(w._replace(growing=w.growing | {r}), r, events.LeaveRequested())

    def restart(self, w: World, r: int, found: Kept | None = None) -> World:
        """Return the world after replica `r` starts again from initial weights or the snapshot that it `found`."""
        life = w.lives[r] + 1
        late = w.late | {r} if self._over(w) else w.late
        w = w._replace(lives=put(w.lives, r, life), late=late, growing=w.growing - {r})
        if w.widths:
            w = w._replace(widths=put(w.widths, r, (*w.widths[r], w.left[r])))
        born = self._born(replica_at(w, r), name_at(w, r), found.state if found else None)
        kept = w.kept[r][w.kept[r].index(found) :] if found else ()
        w = w._replace(replicas=put(w.replicas, r, born), kept=put(w.kept, r, kept))
        if found is not None:
            w = w._replace(content=put(w.content, r, found.content), commits=self._held_again(w, r, found))
            invariants.agreement(r, found.state, self.held(w), self._replicas(w))
        return self.tell(self.oversee(w, r), r, events.Started())

    def double(self, w: World, r: int) -> World:
        """Return the world after a second supervisor starts replica `r` beside its life.

        The first one starts it no more.
        """
        old = replica_at(w, r)
        w = w._replace(
            replicas=(*w.replicas, self._born(old, named(old, 0, SECOND_RUN))),
            content=(*w.content, self._contents.id(())),
            kept=(*w.kept, ()),
            local=(*w.local, 0),
            trained=(*w.trained, ()),
            asked=(*w.asked, None),
            answers=(*w.answers, None),
            lives=(*w.lives, 0),
            late=w.late | ({r, len(w.replicas)} if self._over(w) else {r}),
            doubles=w.doubles - 1,
            second=old,
        )
        place = len(w.replicas) - 1
        return self.tell(self.oversee(w, place), place, events.Started())

    def oversee(self, w: World, r: int) -> World:
        """Return the world after the supervisor at a place reports what runs there and what has exited."""
        me = (replica_at(w, r), name_at(w, r))
        exited = self.lighthouse(w).exited
        if w.second >= 0:
            exited = frozenset(e for e in exited if same_run(e, me))
        return self.consult(w, quorum_events.ProcessesReported(Running({me[0]: me[1]}), exited, frozenset(), 0.0))

    def _hold(self, w: World, r: int, state: state_id.StateId, content: Content) -> World:
        """Return the world in which replica `r` holds `state` and keeps a snapshot of it."""
        id_ = self._contents.id(content)
        w = w._replace(content=put(w.content, r, id_))
        if not self.bounds.recovery:
            return w
        return w._replace(kept=put(w.kept, r, (Kept(state, id_), *w.kept[r])[:2]))

    def _held_again(self, w: World, r: int, found: Kept) -> frozenset[CommitSeen]:
        """Return the commits that must not get lost; the new life of replica `r` holds them too."""
        me = (replica_at(w, r), name_at(w, r))
        return frozenset(
            d._replace(holders=d.holders | {me}) if d.content == found.content else d for d in w.commits
        )

    # What a replica does.

    def _apply(self, w: World, r: int, event: events.Event, effect: effects.Effect) -> World:
        match effect:
            case effects.RequestGrant():
                w = w._replace(asked=put(w.asked, r, effect), answers=put(w.answers, r, None))
                return w if effect.pause else self.deliver(w, r)
            case effects.RunBatch(_, places):
                at_once = width_of(w, (replica_at(w, r), name_at(w, r))) or 1
                begun = places if self.bounds.eager else head(places, at_once)
                return w._replace(trained=put(w.trained, r, begun))
            case effects.DropGradient():
                return w._replace(trained=put(w.trained, r, ()))
            case effects.Reduce():
                return self._enter(w, r, effect)
            case effects.SendToken(token):
                return self._send(w, r, token)
            case effects.Commit(record):
                decided = isinstance(event, events.TokenArrived | events.Reduced)
                return self._commit(w, r, record, decided)
            case effects.DropSnapshots():
                return w._replace(kept=put(w.kept, r, ()))
            case effects.Exit(code, why) if self.bounds.lie and code and r != w.liar:
                lies.takes_no_other(r, w.liar, why)
                return w
            case effects.Exit(_, why) if r in w.growing and why == LEFT and w.replicas[r] >= 0:
                invariants.repeats_nothing(r, w.trained[r])
                return self.die(w, r)._replace(growing=w.growing)
            case effects.Exit(code, why) if w.replicas[r] >= 0 and (code or why == LEFT or self._leaves(w, r)):
                return self.die(w, r)
            case _:
                return w

    def drain(self, w: World, r: int) -> World:
        """Return the world after an operator drains replica `r`."""
        w = self.consult(w._replace(drains=w.drains - 1), quorum_events.Commanded("drain", r, "maintenance", 0.0))
        return w._replace(late=w.late | {r}) if w.replicas[r] < 0 else w

    def deliver(self, w: World, r: int) -> World:
        """Return the world after the request of replica `r` reaches the lighthouse; only answers travel slowly."""
        ask = w.asked[r]
        assert ask is not None
        if r in w.exiled:  # it is sent again and again, and arrives when it can
            return w._replace(asked=put(w.asked, r, replace(ask, pause=True)))
        w = w._replace(asked=put(w.asked, r, replace(ask, pause=False)))
        ranks = width_of(w, (replica_at(w, r), name_at(w, r)))
        ring = tuple(f"replica-{r}:{rank}" for rank in range(ranks))
        return self.consult(w, quorum_events.Asked(quorum_events.OpenRequest(ask.report, id=r, ring=ring), 0.0))

    def lie(self, w: World, r: int) -> World:
        """Return the world after replica `r` sends a report with a wrong value."""
        me = self.replica(w, r)
        assert me is not None
        asked = w.asked[r]
        report, false = lies.told(me, self.bounds.lie, None if asked is None else asked.report)
        w = w._replace(lies=w.lies - 1, liar=r, false=(*w.false, *false))
        return self.consult(w, quorum_events.Asked(quorum_events.OpenRequest(report, id=r), 0.0))

    def _enter(self, w: World, r: int, order: effects.Reduce) -> World:
        me, here, fence = replica_at(w, r), self.replica(w, r), order.fence
        assert here is not None
        assert here.grant is not None
        runs: tuple[Run, ...] = ()
        if order.role == "contribute":
            w, places = self._train(w, r, order.places)
            shard = 0 if self._units.shared else me
            runs = ledger(self._contents.items[w.content[r]], self._shards).at(shard, places)
            runs = runs if self.bounds.replicated_cursors else ((me, w.local[r], 1),)
        entry = WorldEntry(me, name_at(w, r), here.grant.term, runs, order.prev, here.grant.widths)
        rings = dict(w.rings)
        if any(e[:3] == entry[:3] for e in rings.get(fence, ())):
            return w
        rings[fence] = (*rings.get(fence, ()), entry)
        current = {p.fence for p in self._replicas(w) if p is not None}
        rings = {f: e for f, e in rings.items() if f == fence or f in current}
        return w._replace(rings=tuple(sorted(rings.items(), key=lambda i: (i[0].epoch, i[0].step, i[0].attempt))))

    def _train(self, w: World, r: int, places: Places) -> tuple[World, Places]:
        """Return the world in which replica `r` has trained `places`, and all that it has trained then."""
        before = w.trained[r]
        common = min(size(before), size(places))
        invariants.trains_what_is_due(r, head(before, common), head(places, common))
        trained = max(places, before, key=size)
        return w._replace(trained=put(w.trained, r, trained)), trained

    def _send(self, w: World, r: int, token: CommitToken) -> World:
        me = self.replica(w, r)
        assert me is not None
        assert me.grant is not None
        ring = me.grant.ring
        right = me.grant.members[(ring.index(me.me) + 1) % len(ring)]
        to = place_of(w, (right.replica, right.incarnation))
        peer = None if to is None else self.replica(w, to)
        if to is None or peer is None or self._of_another_grant(me, peer):
            return w
        tokens = [t for t in w.tokens if self.bounds.late_tokens or not self._stale(w, t)]
        return w._replace(tokens=tuple(sorted([*tokens, (to, token)], key=repr)))

    def _commit(self, w: World, r: int, record: CommitRecord, decided: bool) -> World:
        """Return the world after replica `r` applies a record.

        `decided`: a token decided on it, so that all members have it; otherwise a grant did.
        """
        before = self._contents.items[w.content[r]]
        invariants.on_sound_states(r, record, [f for f in w.flipped if f.life == w.lives[f.replica]])
        invariants.enough(r, record, self.bounds.min_replicas)
        units = [(c.shard, c.index + n, c.replica) for c in record.contributions for n in range(c.units)]
        invariants.exactly_once(r, before, [(shard, unit) for shard, unit, _ in units], self._holes)
        me = self.replica(w, r)
        if me is not None and me.grant is not None and me.grant.epoch == record.epoch:
            invariants.as_many_units_as_wanted(r, record, me.grant, self._units)
        if known := self._widths(w, record):
            invariants.names_widths(r, record, known, self.bounds.ranks)
        content = (*before, frozenset(units))
        w = self._hold(w._replace(trained=put(w.trained, r, ())), r, record.state_id, content)
        if not self.bounds.replicated_cursors and replica_at(w, r) in record.contributors:
            w = w._replace(local=put(w.local, r, w.local[r] + 1))
        held, replicas = self.held(w), self._sound(w)
        invariants.agreement(r, record.state_id, held, replicas)
        invariants.one_history(r, held, replicas)
        invariants.leaves_in_sight(r, replicas)
        for other, snapshots in enumerate(w.kept):
            if w.replicas[other] < 0:
                lives = [self._contents.items[snapshot.content] for snapshot in snapshots]
                invariants.one_future(r, content, other, lives)
        members = self._members(w, record.epoch)
        for done in w.commits:
            if done.epoch < record.epoch and done.holders & members:
                invariants.nothing_lost(record, content, self._contents.items[done.content], done.epoch)
        holders = frozenset(
            m
            for m in members
            if m[0] in record.contributors
            and place_of(w, m) is not None
            and (decided or self._has(w, m, record.state_id))
        )
        done = CommitSeen(self._contents.id(content), record.epoch, holders)
        alive = {d for d in w.commits if any(place_of(w, m) is not None for m in d.holders)}
        return w._replace(commits=frozenset(alive | {done}))

    # What the lighthouse does.

    def consult(self, w: World, event: quorum_events.Event) -> World:
        """Return the world after the lighthouse takes an event; its answers start to travel."""
        try:
            reached, due = self.quorums.after(w.lighthouse, event)
        except AssertionError as error:
            raise invariants.Violation(f"identity: {error}") from error
        before, after = self.lighthouse(w), self.quorums.items[reached]
        w = w._replace(lighthouse=reached)
        if w.second >= 0:
            younger = (w.second, name_at(w, len(w.replicas) - 1))
            fenced = (e.answer for e in due if isinstance(e, quorum_events.Reply) and e.id == len(w.replicas) - 1)
            invariants.younger_counts(younger, before.grant, after.grant, fenced)
        audited = False
        for effect in due:
            match effect:
                case quorum_events.Reply(_, r, answer):
                    w = w._replace(asked=put(w.asked, r, None), answers=put(w.answers, r, answer))
                    if isinstance(answer, Continue):
                        w = self.answer(w, r)  # to be broken before or after it is the same: both are void
                case quorum_events.Evict(replica, incarnation):
                    place = place_of(w, (replica, incarnation))
                    if place is not None and self.replica(w, place) is not None:
                        w = self.die(w, place)
                case quorum_events.Note("HeadRolledBack"):
                    audited = True
        invariants.head_stays(before.head, after.head, audited)
        if after.epoch > before.epoch:
            if self.bounds.ranks and after.grant is not None:
                invariants.no_longer_than_needed(after.grant, self._units)
                invariants.whole_ones_take_over(after.grant, self._units)
            invariants.no_storm(after.epoch, after.head)
        if self.bounds.lie:
            lies.is_harmless(after, w.false, self.halted(w))
        if self.halted(w) and not after.diverged:
            whole = (None if r in w.torn else peer for r, peer in enumerate(self._replicas(w)))
            invariants.truly_lost(after.head, tuple(whole), w.kept)
        return w

    def put_back(self, w: World) -> World:
        """Return the world after the lighthouse comes back with the copy of its store that was put aside."""
        return self.reopen(w._replace(lighthouse=w.copy, copy=-1), False)

    def reopen(self, w: World, wiped: bool) -> World:
        """Return the world after the lighthouse comes back with what was durable, or `wiped`.

        Open requests are sent again.
        """
        s = self.lighthouse(w)
        if wiped:
            state = quorum.LighthouseState.empty(s.policy, s.term + 1)
        else:
            views = tuple(quorum.View() for _ in s.views)
            state = replace(s, term=s.term + 1, views=views, broken=False, since=None, settled=0)
            state = quorum.remembered(state)
        w = w._replace(lighthouse=self.quorums.id(state))
        places = range(self.bounds.replicas)
        known = {r: None if self.replica(w, r) is None else named(r, w.lives[r]) for r in places}
        exited = frozenset((r, named(r, n)) for r in places for n in range(w.lives[r]))
        pending = frozenset(w.exits)
        running = {r: i for r, i in known.items() if i is not None or not any(e[0] == r for e in pending)}
        w = self.consult(
            w, quorum_events.ProcessesReported(Running(running), (exited | s.exited) - pending, frozenset(), 0.0)
        )
        if w.second >= 0 and w.replicas[-1] >= 0:
            w = self.oversee(w, len(w.replicas) - 1)
        for r, ask in enumerate(w.asked):
            if ask is not None and not ask.pause and w.replicas[r] >= 0:
                w = self.deliver(w, r)
        return w
