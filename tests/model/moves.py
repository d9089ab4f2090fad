"""Everything that may happen next in a world, each with a sentence for humans."""

from collections.abc import Callable, Iterator
from functools import partial

from ft_hsdp.core import events, state_id
from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.grant import Answer, CatchUp, Grant
from ft_hsdp.core.replica_state import Phase, Replica
from lighthouse.quorum import commands
from lighthouse.quorum import events as quorum_events
from tests.model import invariants
from tests.model.model import EVICT_S, GRACE_S, Model
from tests.model.world import Running, World, edges, name_at, place_of, replica_at, severed

Move = tuple[str, Callable[[], World]]


def successors(model: Model, w: World) -> Iterator[Move]:
    """Yield everything that can happen in `w`: a label, and a function that returns the world after it."""
    if model.halted(w):
        return
    for r in range(len(w.replicas)):
        me, id_ = model.replica(w, r), replica_at(w, r)
        if me is not None and r in w.torn:
            yield f"the leader of {_who(w, r)} ends, too", partial(model.die, w, r)
        elif me is not None:
            yield from _of_replica(model, w, r, me)
        elif (id_, name_at(w, r)) not in w.exits and r != w.second and id_ not in model.lighthouse(w).drained:
            grown = r in w.growing and w.kept[r]  # its memory is still there
            if not grown:
                yield f"{_who(w, r)} restarts", partial(model.restart, w, r)
            for found in w.kept[r][:1] if grown else w.kept[r]:
                yield (f"{_who(w, r)} restarts and finds {found.state}", partial(model.restart, w, r, found))
        yield from _of_hosts(model, w, r, me)
    yield from _of_two_lives(model, w)
    yield from _of_messages(model, w)
    yield from _of_lighthouse(model, w)
    for r in range(model.bounds.replicas if w.drains else 0):
        order = quorum_events.Commanded("drain", r, "", 0.0)
        plan = commands.plan(model.lighthouse(w), order)
        if isinstance(plan, commands.CommandPlan) and plan.due:
            yield f"an operator drains replica {r}", partial(model.drain, w, r)


def patience(model: Model, w: World) -> Iterator[Move]:
    """Yield what the passing of time brings when nothing else can happen."""
    s = model.lighthouse(w)
    for r in range(len(w.replicas)):
        me = model.replica(w, r)
        if me is not None and me.phase is Phase.ASKING and me.intact:
            yield (f"{_who(w, r)} gets no answer in time", partial(model.tell, w, r, events.Unanswered()))
        if me is not None and me.phase is Phase.REDUCING and model.waits(me):
            yield f"{_who(w, r)} waits no longer for its fetch", partial(model.vote, w, r)
    if s.since is not None and not s.finished:
        yield "the grace of the silent ends", partial(model.consult, w, quorum_events.Ticked(GRACE_S))
        yield "the silent are evicted", partial(model.consult, w, quorum_events.Ticked(EVICT_S))
    for r in sorted(w.exiled - w.torn):
        yield f"{_who(w, r)} reaches the lighthouse again", partial(w._replace, exiled=w.exiled - {r})
        yield from _lease_ends(model, w, r)


def _lease_ends(model: Model, w: World, r: int) -> Iterator[Move]:
    """Yield what happens to a replica whose lease ends without an answer, and to those that wait for it."""
    me = model.replica(w, r)
    if me is None or me.phase is not Phase.ASKING or not me.intact:
        return
    after = model.tell(w, r, events.LeaseEnded())
    yield f"the lease of {_who(w, r)} ends", lambda: after
    for other in range(len(w.replicas)):
        peer = model.replica(w, other)
        waits = peer is not None and peer.intact and peer.phase is Phase.REDUCING and peer.grant == me.grant
        if after == w and waits:
            yield f"{_who(w, other)} waits in vain", partial(invariants.accuses_no_living, r, other)


def _of_replica(model: Model, w: World, r: int, me: Replica) -> Iterator[Move]:
    answer, ask = w.answers[r], w.asked[r]
    if ask is not None and ask.pause and r not in w.exiled:
        yield f"{_who(w, r)} asks again", partial(model.deliver, w, r)
    if answer is not None:
        yield f"{_who(w, r)} gets {_short(answer)}", partial(model.answer, w, r)
    if w.lapses and me.phase is Phase.ASKING and me.intact:
        fewer = w._replace(lapses=w.lapses - 1)
        yield f"{_who(w, r)} gets no answer in time", partial(model.tell, fewer, r, events.Unanswered())
    known = model.lighthouse(w).views[me.me].ask
    if r == w.liar and ask is not None and not ask.pause and (known is None or known.report != ask.report):
        yield f"{_who(w, r)} asks again", partial(model.deliver, w, r)
    if w.lies and w.liar in (-1, r) and me.phase is not Phase.DONE:
        yield f"{_who(w, r)} reports a wrong {model.bounds.lie}", partial(model.lie, w, r)
    first = me.grant is not None and me.grant.ring[0] == me.me
    if me.phase is Phase.REDUCING and first and not model.waits(me) and (record := model.sum(w, me)) is not None:
        yield (
            f"{_who(w, r)} holds the sum of {_fence(me.fence)}: replicas {list(record.contributors)}",
            partial(model.reduced, w, r, record),
        )
    voting = me.phase in (Phase.ASKING, Phase.REDUCING) and me.intact and me.verified
    if w.flips and voting and me.state.step < me.steps:
        yield f"{_who(w, r)} has its state corrupted", partial(model.flip, w, r)
    if me.grant is not None and me.intact:
        broken = events.RingBroken(me.grant.epoch)
        if _torn(model, w, r, me):
            yield f"{_who(w, r)} sees the ring of epoch {broken.epoch} break", partial(model.tell, w, r, broken)
        elif w.breaks:
            yield (
                f"a link of {_who(w, r)} in epoch {broken.epoch} breaks",
                partial(model.tell, w._replace(breaks=w.breaks - 1), r, broken),
            )
    yield from _of_links(model, w, r, me)
    if me.phase is Phase.LEAVING:
        yield f"{_who(w, r)} leaves before the others do", partial(model.tell, w, r, events.LeaveOverdue())
    if me.fetching is not None:
        yield from _fetches(model, w, r, me, me.fetching)
    for shown in _shown(model, w, r, me):
        yield (
            f"{_who(w, r)} is shown epoch {shown.epoch} by a member",
            partial(model.tell, w, r, events.GrantShown(shown)),
        )
    if w.leaves and me.phase is not Phase.DONE and not me.departing:
        told = w._replace(leaves=w.leaves - 1)
        yield f"{_who(w, r)} is told to end", partial(model.tell, told, r, events.LeaveRequested())
    if w.tears and me.phase is not Phase.DONE:
        yield f"{_who(w, r)} loses a rank, and its leader is cut off", partial(model.tear, w, r)
    if w.deaths and me.phase is not Phase.DONE:
        yield f"{_who(w, r)} is killed", partial(model.die, w._replace(deaths=w.deaths - 1), r)


def _of_links(model: Model, w: World, r: int, me: Replica) -> Iterator[Move]:
    """Yield what broken links bring.

    Neighbours that cannot connect, a process that cannot, a lighthouse out of reach.
    """
    for a, b in edges(me.grant) if me.grant is not None and me.intact and me.phase is Phase.REDUCING else ():
        if me.me in (a.replica, b.replica) and severed(model.bounds, w, (a, b)) and me.incarnation not in w.short:
            other = b.replica if me.me == a.replica else a.replica
            lost = events.RingBroken(me.grant.epoch if me.grant else 0, other, me.me)
            yield f"{_who(w, r)} cannot connect to replica {other}", partial(model.tell, w, r, lost)
    if me.incarnation in w.short:
        yield from _exhausted(model, w, r, me)
    elif w.shortages and me.phase is not Phase.DONE:
        short = w._replace(shortages=w.shortages - 1, short=w.short | {me.incarnation})
        yield f"{_who(w, r)} has no descriptor left", lambda: short
    if (
        w.exiles
        and r not in w.exiled
        and w.asked[r] is None
        and w.answers[r] is None
        and me.phase is not Phase.DONE
    ):
        exiled = w._replace(exiles=w.exiles - 1, exiled=w.exiled | {r})
        yield f"{_who(w, r)} cannot reach the lighthouse any more", lambda: exiled


def _exhausted(model: Model, w: World, r: int, me: Replica) -> Iterator[Move]:
    """Yield the end of a process that cannot connect: it ends itself when it needs to, and blames no neighbour."""
    if me.phase is Phase.REDUCING:
        yield f"{_who(w, r)} ends itself", partial(model.die, w, r)


def _of_hosts(model: Model, w: World, r: int, me: Replica | None) -> Iterator[Move]:
    """Yield what hosts bring that are lost without a spare, or come back, also while a replica starts again."""
    if w.losses and w.left[r] > 1 and (me is None or me.phase is not Phase.DONE):
        yield f"{_who(w, r)} loses a host", partial(model.lose_host, w, r)
    trains = me is not None and me.intact and me.role == "contribute" and not me.departing
    if w.returns and w.left[r] < model.bounds.ranks and (me is None or trains):
        yield f"{_who(w, r)} gets a host back", partial(model.get_host, w, r)


def _of_two_lives(model: Model, w: World) -> Iterator[Move]:
    """Yield what a second supervisor brings.

    It starts a life, both report again and again, a dropped request is repeated.
    """
    if w.doubles:
        for r in range(len(w.replicas)):
            if model.replica(w, r) is not None:
                yield f"replica {r} is started by a second supervisor", partial(model.double, w, r)
    for r in (w.second, len(w.replicas) - 1) if w.second >= 0 else ():
        if model.replica(w, r) is None:
            continue
        yield f"{_who(w, r)} is reported to run", partial(model.oversee, w, r)
        ask, known = w.asked[r], model.lighthouse(w).views[w.second].ask
        if ask is not None and not ask.pause and (known is None or known.id != r):
            yield f"{_who(w, r)} asks again", partial(model.deliver, w, r)


def _of_messages(model: Model, w: World) -> Iterator[Move]:
    for item in w.tokens:
        to, token = item
        rest = w._replace(tokens=tuple(t for t in w.tokens if t is not item))
        word = f"{'verdict' if token.verdict else 'pass 1'} {'yes' if token.yes else 'no'}"
        yield (
            f"{_who(w, to)} gets the token of {_fence(token.fence)}: {word}",
            partial(model.hand_over, rest, to, token),
        )
    for gone in w.exits:
        others = w._replace(exits=tuple(e for e in w.exits if e != gone))
        seen = quorum_events.ProcessesReported(Running({gone[0]: None}), frozenset({gone}), frozenset(), 0.0)
        yield (
            f"the lighthouse learns that incarnation {gone[1]} has exited",
            partial(model.consult, others, seen),
        )


def _of_lighthouse(model: Model, w: World) -> Iterator[Move]:
    s = model.lighthouse(w)
    if w.pauses and s.since is not None and not s.finished:
        fewer = w._replace(pauses=w.pauses - 1)
        yield "the grace of the silent ends", partial(model.consult, fewer, quorum_events.Ticked(GRACE_S))
        yield "the silent are evicted", partial(model.consult, fewer, quorum_events.Ticked(EVICT_S))
    if w.copies and w.copy < 0:
        put_aside = w._replace(copies=w.copies - 1, copy=w.lighthouse)
        yield "the lighthouse has its store copied", lambda: put_aside
    if w.copy >= 0:
        yield "the lighthouse restarts with the older copy", partial(model.put_back, w)
    if w.restarts:
        yield "the lighthouse restarts", partial(model.reopen, w._replace(restarts=w.restarts - 1), False)
    if w.wipes:
        yield (
            "the lighthouse restarts with an empty store",
            partial(model.reopen, w._replace(wipes=w.wipes - 1), True),
        )


def _fetches(model: Model, w: World, r: int, me: Replica, base: state_id.StateId) -> Iterator[Move]:
    donor = _donor(model, w, r, me)
    if donor is not None:
        yield f"{_who(w, r)} has fetched {base} from {donor}", partial(model.fetch, w, r, base, donor)
    elif me.phase in (Phase.FETCHING, Phase.FINAL) and w.asked[r] is None and w.answers[r] is None:
        yield f"{_who(w, r)} finds no donor", partial(model.tell, w, r, events.FetchFailed(base, "gone"))


def _torn(model: Model, w: World, r: int, me: Replica) -> bool:
    """Return whether a member of the epoch of replica `r` is gone from it, or builds on another lineage."""
    assert me.grant is not None
    for member in me.grant.members:
        if member.replica == me.me:
            continue
        place = place_of(w, (member.replica, member.incarnation))
        peer = None if place is None else model.replica(w, place)
        if peer is None or peer.phase is Phase.DONE:
            return True
        epoch = peer.grant.epoch if peer.grant else 0
        if epoch > me.grant.epoch or (epoch == me.grant.epoch and not (peer.intact and peer.grant == me.grant)):
            return True
        if epoch < me.grant.epoch <= peer.seen[1]:
            return True
    entries = dict(w.rings).get(me.fence, ())
    return me.phase is Phase.REDUCING and len({e.prev for e in entries}) > 1


def _donor(model: Model, w: World, r: int, me: Replica) -> int | None:
    """Return a live replica that holds, or pinned a snapshot of, the state that `me` fetches."""
    base = me.fetching
    for d in range(len(w.replicas)):
        peer = model.replica(w, d)
        if d == r or peer is None or base is None:
            continue
        pinned = (
            peer.grant is not None
            and me.grant is not None
            and peer.grant.epoch == me.grant.epoch
            and peer.verified
            and peer.fetching is None
            and peer.state.step >= base.step
        )
        pin = peer.grant.base if pinned and peer.grant is not None else peer.state
        if state_id.same(peer.state, base) or state_id.same(pin, base):
            return d
    return None


def _shown(model: Model, w: World, r: int, me: Replica) -> Iterator[Grant]:
    """Yield newer grants that a member may show to `r`, other than the one already on its way."""
    seen: set[int] = set()
    for other in range(len(w.replicas)):
        peer = model.replica(w, other)
        if peer is None or other == r or peer.grant is None or not peer.intact or peer.grant is w.answers[r]:
            continue
        grant = peer.grant
        newer = (grant.term, grant.epoch) > me.seen and grant.member(me.me, me.incarnation)
        if newer and grant.epoch not in seen:
            seen.add(grant.epoch)
            yield grant


def _who(w: World, place: int) -> str:
    r = replica_at(w, place)
    return f"replica {r}" if r == place else f"replica {r} of the second supervisor"


def _fence(f: AttemptId) -> str:
    return f"epoch {f.epoch} step {f.step}" + (f" attempt {f.attempt}" if f.attempt else "")


def _short(answer: Answer) -> str:
    match answer:
        case Grant(_, epoch, base, members):
            return f"epoch {epoch} on {base}: " + ", ".join(f"{m.replica} {m.role}" for m in members)
        case CatchUp(base):
            return f"word to catch up with {base}"
        case _:
            return type(answer).__name__.lower()
