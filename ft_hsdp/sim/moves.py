"""Moves: everything that may happen next in a world, each with a sentence for humans."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ft_hsdp.core import events, lineage
from ft_hsdp.core.assignment import Answer, Grant
from ft_hsdp.core.commit import Fence
from ft_hsdp.core.standing import Phase, Replica
from ft_hsdp.sim.model import EVICT_S, GRACE_S, Model, Running
from ft_hsdp.sim.world import World
from lighthouse import commands
from lighthouse import state as quorum

Move = tuple[str, Callable[[], World]]


def successors(model: Model, w: World) -> Iterator[Move]:
    """Everything that can happen in ``w``: a label, and how to get the world after it."""
    if model.halted(w):
        return
    for r in range(model.bounds.replicas):
        me = model.replica(w, r)
        if me is not None:
            yield from _of_replica(model, w, r, me)
        elif not any(e[0] == r for e in w.exits) and r not in model.lighthouse(w).drained:
            yield f"replica {r} restarts", lambda r=r: model.restart(w, r)  # type: ignore[misc]
            for found in w.kept[r]:
                yield (
                    f"replica {r} restarts and finds {found.state}",
                    lambda r=r, found=found: model.restart(w, r, found),  # type: ignore[misc]
                )
    yield from _of_messages(model, w)
    yield from _of_lighthouse(model, w)
    for r in range(model.bounds.replicas if w.drains else 0):
        order = quorum.Commanded("drain", r, "", 0.0)
        plan = commands.plan(model.lighthouse(w), order, commands.Supervised())
        if isinstance(plan, commands.Plan) and plan.event:
            yield f"an operator drains replica {r}", lambda r=r: model.drain(w, r)  # type: ignore[misc]


def patience(model: Model, w: World) -> Iterator[Move]:
    """What the mere passing of time brings when nothing else can happen."""
    s = model.lighthouse(w)
    for r in range(model.bounds.replicas):
        me = model.replica(w, r)
        if me is not None and me.phase is Phase.ASKING and me.intact:
            yield (
                f"replica {r} gets no answer in time",
                lambda r=r: model.tell(w, r, events.Unanswered()),  # type: ignore[misc]
            )
        if me is not None and me.phase is Phase.REDUCING and model.waits(me):
            yield f"replica {r} waits no longer for its fetch", lambda r=r: model.vote(w, r)  # type: ignore[misc]
    if s.since is not None and not s.finished:
        yield "the grace of the silent ends", lambda: model.consult(w, quorum.Ticked(GRACE_S))
        yield "the silent are evicted", lambda: model.consult(w, quorum.Ticked(EVICT_S))


def _of_replica(model: Model, w: World, r: int, me: Replica) -> Iterator[Move]:
    answer = w.answers[r]
    if answer is not None:
        yield f"replica {r} gets {_short(answer)}", lambda: model.answer(w, r)
    if w.lapses and me.phase is Phase.ASKING and me.intact:
        fewer = w._replace(lapses=w.lapses - 1)
        yield f"replica {r} gets no answer in time", lambda: model.tell(fewer, r, events.Unanswered())
    first = me.grant is not None and me.grant.ring[0] == r
    if me.phase is Phase.REDUCING and first and not model.waits(me) and (record := model.sum(w, me)) is not None:
        yield (
            f"replica {r} holds the sum of {_fence(me.fence)}: replicas {list(record.contributors)}",
            lambda: model.reduced(w, r, record),
        )
    voting = me.phase in (Phase.ASKING, Phase.REDUCING) and me.intact and me.verified
    if w.flips and voting and me.state.step < me.steps:
        yield f"replica {r} has its state corrupted", lambda: model.flip(w, r)
    if me.grant is not None and me.intact:
        broken = events.RingBroken(me.grant.epoch)
        if _torn(model, w, r, me):
            yield f"replica {r} sees the ring of epoch {broken.epoch} break", lambda: model.tell(w, r, broken)
        elif w.breaks:
            yield (
                f"a link of replica {r} in epoch {broken.epoch} breaks",
                lambda: model.tell(w._replace(breaks=w.breaks - 1), r, broken),
            )
    if me.phase is Phase.LEAVING:
        yield f"replica {r} leaves before the others do", lambda: model.tell(w, r, events.LeaveOverdue())
    if me.fetching is not None:
        yield from _fetches(model, w, r, me, me.fetching)
    for shown in _shown(model, w, r, me):
        yield (
            f"replica {r} is shown epoch {shown.epoch} by a member",
            lambda shown=shown: model.tell(w, r, events.GrantShown(shown)),  # type: ignore[misc]
        )
    if w.leaves and me.phase is not Phase.DONE and not me.departing:
        told = w._replace(leaves=w.leaves - 1)
        yield f"replica {r} is told to end", lambda: model.tell(told, r, events.LeaveRequested())
    if w.deaths and me.phase is not Phase.DONE:
        yield f"replica {r} is killed", lambda: model.die(w._replace(deaths=w.deaths - 1), r)


def _of_messages(model: Model, w: World) -> Iterator[Move]:
    for item in w.tokens:
        to, token = item
        rest = w._replace(tokens=tuple(t for t in w.tokens if t is not item))
        word = f"{'verdict' if token.verdict else 'pass 1'} {'yes' if token.yes else 'no'}"
        yield (
            f"replica {to} gets the token of {_fence(token.fence)}: {word}",
            lambda to=to, token=token, rest=rest: model.hand_over(rest, to, token),  # type: ignore[misc]
        )
    for gone in w.exits:
        others = w._replace(exits=tuple(e for e in w.exits if e != gone))
        seen = quorum.ProcessesReported(Running({gone[0]: None}), frozenset({gone}), frozenset(), 0.0)
        yield (
            f"the lighthouse learns that incarnation {gone[1]} has exited",
            lambda others=others, seen=seen: model.consult(others, seen),  # type: ignore[misc]
        )


def _of_lighthouse(model: Model, w: World) -> Iterator[Move]:
    s = model.lighthouse(w)
    if w.pauses and s.since is not None and not s.finished:
        fewer = w._replace(pauses=w.pauses - 1)
        yield "the grace of the silent ends", lambda: model.consult(fewer, quorum.Ticked(GRACE_S))
        yield "the silent are evicted", lambda: model.consult(fewer, quorum.Ticked(EVICT_S))
    if w.restarts:
        yield "the lighthouse restarts", lambda: model.reopen(w._replace(restarts=w.restarts - 1), False)
    if w.wipes:
        yield (
            "the lighthouse restarts with an empty store",
            lambda: model.reopen(w._replace(wipes=w.wipes - 1), True),
        )


def _fetches(model: Model, w: World, r: int, me: Replica, base: lineage.StateId) -> Iterator[Move]:
    donor = _donor(model, w, r, me)
    if donor is not None:
        yield f"replica {r} has fetched {base} from {donor}", lambda: model.fetch(w, r, base, donor)
    elif me.phase is Phase.FINAL and w.asked[r] is None and w.answers[r] is None:
        yield f"replica {r} finds no donor", lambda: model.tell(w, r, events.FetchFailed(base, "gone"))


def _torn(model: Model, w: World, r: int, me: Replica) -> bool:
    """Whether a member of ``r``'s epoch is gone from it, or builds on another lineage."""
    assert me.grant is not None
    for member in me.grant.members:
        if member.replica == r:
            continue
        peer = model.replica(w, member.replica)
        if peer is None or peer.incarnation != member.incarnation or peer.phase is Phase.DONE:
            return True
        epoch = peer.grant.epoch if peer.grant else 0
        if epoch > me.grant.epoch or (epoch == me.grant.epoch and not peer.intact):
            return True
        if epoch < me.grant.epoch <= peer.seen[1]:
            return True
    entries = dict(w.rings).get(me.fence, ())
    return me.phase is Phase.REDUCING and len({e.prev for e in entries}) > 1


def _donor(model: Model, w: World, r: int, me: Replica) -> int | None:
    """A live replica that holds, or pinned a snapshot of, the state that ``me`` fetches."""
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
        if lineage.same(peer.state, base) or lineage.same(pin, base):
            return d
    return None


def _shown(model: Model, w: World, r: int, me: Replica) -> Iterator[Grant]:
    """Newer grants that a member may show to ``r``, other than the one already on its way."""
    seen: set[int] = set()
    for other in range(len(w.replicas)):
        peer = model.replica(w, other)
        if peer is None or other == r or peer.grant is None or not peer.intact or peer.grant is w.answers[r]:
            continue
        grant = peer.grant
        newer = (grant.term, grant.epoch) > me.seen and grant.member(r, me.incarnation)
        if newer and grant.epoch not in seen:
            seen.add(grant.epoch)
            yield grant


def _fence(f: Fence) -> str:
    return f"epoch {f.epoch} step {f.step}" + (f" attempt {f.attempt}" if f.attempt else "")


def _short(answer: Answer) -> str:
    match answer:
        case Grant(_, epoch, base, members):
            return f"epoch {epoch} on {base}: " + ", ".join(f"{m.replica} {m.role}" for m in members)
        case _:
            return type(answer).__name__.lower()
