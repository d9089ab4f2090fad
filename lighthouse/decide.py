"""Decide: ``transition(state, event) -> (state, effects)``, the lighthouse's decisions. No I/O, no clock.

A membership that works is left alone: the first request for a step settles its grant at once. A round is held only
when the ring of the current epoch is of no more use, or before the first epoch.
"""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.core import lineage
from ft_hsdp.core.assignment import Refused, Report
from lighthouse import quorum
from lighthouse.commands import obey
from lighthouse.exits import learn, outlived
from lighthouse.quorum import Base, Incarnation
from lighthouse.rounds import heard, hold, overruled_fences
from lighthouse.state import (
    Asked,
    AskWithdrawn,
    Commanded,
    Effect,
    Event,
    Note,
    ProcessesReported,
    Reply,
    Request,
    State,
    Step,
    Ticked,
    alive,
    answer,
    go_on,
    member,
    new_epoch,
    raise_head,
    serve,
    total,
    wanted,
    with_view,
)


def transition(s: State, event: Event) -> Step:
    """One event in, the next state and what to do out. Effects may leave only when the state is durable."""
    match event:
        case Asked(request, now):
            s, effects = _asked(s, request, now)
        case AskWithdrawn(replica, id_):
            ask = s.views[replica].ask
            return (with_view(s, replica, ask=None), ()) if ask is not None and ask.id == id_ else (s, ())
        case ProcessesReported():
            s, effects = _processes(s, event)
            now = event.now
        case Commanded():
            s, effects = obey(s, event)
            now = event.now
        case Ticked(now):
            effects = ()
    s, more = hold(s, now)
    return s, effects + more


def _asked(s: State, request: Request, now: float) -> Step:
    """Note the ask; answer at once if the current membership settles it."""
    report = request.report
    me = report.replica
    view = s.views[me]
    who = (me, report.incarnation)
    unknown = view.incarnation != report.incarnation
    if who in s.exited or (unknown and outlived(who, s.exited)):
        return s, (Reply(me, request.id, Refused("this incarnation is known to have exited", 75)),)
    if unknown and view.incarnation is not None and not _superseded(s, who):
        return s, (Reply(me, request.id, Refused(f"fenced: replica {me} has a newer incarnation", 75)),)
    if _known_all(s, report):
        assert s.grant is not None
        return s, (Reply(me, request.id, go_on(s, report)),)
    if s.fresh and report.max_term >= s.term:
        s = replace(s, term=report.max_term + 1)
    epoch = max(s.epoch, report.epoch, report.after, report.state.commit_epoch)
    s = s if epoch == s.epoch else replace(s, epoch=epoch)
    s = with_view(s, me, incarnation=report.incarnation, down=False, lost=False, ask=request)
    if report.departs and _spared(s, report):
        return answer(s, {me: Refused(f"replica {me} leaves on request", 0)})
    s = raise_head(s, report.state)
    if s.checkpoint and report.saved >= s.checkpoint:
        s = replace(s, checkpoint=0)
    if report.diverged or s.diverged:
        return _diverged(s, report)
    if s.grant is None or report.state.step >= s.policy.steps or s.grant.member(me, report.incarnation) is None:
        return s, ()
    if report.after >= s.grant.epoch:
        return (s, ()) if s.broken else (replace(s, broken=True, settled=0, since=now), ())
    return (s, ()) if s.broken else _settle(s, report)


def _known_all(s: State, report: Report) -> bool:
    """Whether a member asks for a step that is settled and says nothing new: all but the first of each step do."""
    view, grant, state = s.views[report.replica], s.grant, report.state
    return (
        grant is not None
        and view.incarnation == report.incarnation
        and view.ask is None
        and view.down is False
        and not (view.lost or s.broken or s.fresh or s.diverged or report.diverged)
        and report.epoch == grant.epoch > report.after
        and report.step <= s.settled
        and state.step < s.policy.steps
        and s.head is not None
        and state.commit_epoch <= s.epoch
        and not lineage.newer(state, s.head)
        and not s.checkpoint
        and grant.member(report.replica, report.incarnation) is not None
    )


def _spared(s: State, report: Report) -> bool:
    """Whether the job goes on without a reporter that leaves: it is no member, and others know what it knows."""
    members = s.grant.members if s.grant else ()
    if any((m.replica, m.incarnation) == (report.replica, report.incarnation) for m in members):
        return False
    if report.prepared is not None or report.doubt is not None:
        return False
    if report.state.step >= s.policy.steps:
        return False
    if s.head is None:
        return report.state.step == 0
    others = any(alive(s, (m.replica, m.incarnation)) for m in members)
    return lineage.newer(s.head, report.state) or (others and not lineage.newer(report.state, s.head))


def _diverged(s: State, report: Report) -> Step:
    """Nobody can tell whose state is right: whoever asks ends, and nothing is overwritten."""
    notes: tuple[Effect, ...] = ()
    if not s.diverged:
        who = ",".join(map(str, report.diverged))
        where = report.doubt or report.state
        why = f"replicas {who} hold different states at {where}, nobody can tell which is right"
        s = replace(s, diverged=report.diverged, halted=why)
        notes = (Note("JobHalted", why, {"replicas": list(report.diverged)}),)
    s, replies = answer(s, {r: Refused(s.halted, 75) for r, v in enumerate(s.views) if v.ask is not None})
    return s, (*notes, *replies)


def _superseded(s: State, who: Incarnation) -> bool:
    """Whether ``who`` is newer than the incarnation that is known. Newest wins.

    It is not in any epoch that is still remembered, and no earlier life of a run that has come further.
    """
    known = s.views[who[0]].incarnation or ""
    return all(who not in e.members for e in s.epochs) and not outlived(who, ((who[0], known),))


def _settle(s: State, report: Report) -> Step:
    """A member asks on a ring that works: the first request for a step settles its membership."""
    assert s.grant is not None
    grant = s.grant
    holds = report.state.step + 1 == report.step
    if report.epoch < grant.epoch or report.step <= s.settled or not holds:
        return serve(s)
    joiners = [v.ask for r, v in enumerate(s.views) if v.ask and grant.member(r, v.incarnation or "") is None]
    if any(quorum.ahead(heard(s, j.report), report.state) for j in joiners):
        return replace(s, broken=True, settled=0), ()
    # Who is not wanted and joins is refused: no more is lost than by its death.
    strangers = [j.report.replica for j in joiners if not wanted(s, j.report.replica)]
    s, turned_away = answer(s, {r: Refused(_unwanted(s, r), 0) for r in strangers})
    joiners = [j for j in joiners if j.report.replica not in strangers]
    voids = quorum.fences(overruled_fences(s, (j.report for j in joiners)))
    base = Base(report.state, None, voids)
    holders = {m.replica for m in grant.members if m.role == "contribute"} | set(report.equal) | {report.replica}
    gone = [m for m in grant.members if (m.replica, m.incarnation) in s.exited or m.replica in report.leaving]
    risen = [m for m in grant.members if m.role == "behind" and m.replica in holders]
    lags = [m for m in grant.members if m.replica in report.lagging and m.replica not in holders]
    able = sum(m.replica in holders for m in grant.members if m not in gone)
    size = total(s, len(grant.members) - len(gone) + len(joiners))
    changed = bool(joiners or gone or risen or lags or size != grant.total) and able >= s.policy.min_replicas
    s = replace(s, settled=report.step)
    if not changed:
        s, replies = serve(s)
        return s, (*turned_away, *replies)
    stay = (m for m in grant.members if m not in gone)
    members = [replace(m, role="contribute" if m.replica in holders else "behind") for m in stay]
    members += [member(ask, base) for ask in joiners]
    whys = (
        ("joined", [j.report.replica for j in joiners]),
        ("gone", [m.replica for m in gone]),
        ("caught up", [m.replica for m in risen]),
        ("needs a newer base", [m.replica for m in lags]),
    )
    told = [f"{what}: replica {','.join(map(str, ids))}" for what, ids in whys if ids]
    why = "; ".join([*told, *([f"{size} replicas are wanted"] if size != grant.total else [])])
    s, note = new_epoch(s, base, tuple(members), why)
    s, replies = serve(s)
    return s, (*turned_away, note, *replies)


def _unwanted(s: State, replica: int) -> str:
    """Why a replica may not take part."""
    drained = replica in s.drained
    return f"replica {replica} is drained" if drained else f"replica {replica}: the job has {s.target} replicas"


def _processes(s: State, event: ProcessesReported) -> Step:
    """Take a supervisor's word on what runs: the only evidence that counts as death."""
    s, news = learn(s, event)
    notes: list[Effect] = [
        Note("ExitReported", "its supervisor saw it end", {"replica": replica, "incarnation": incarnation})
        for replica, incarnation in news
    ]
    if news:
        s = replace(s, last_exit=event.now)
    for replica, running in event.running.items():
        view = s.views[replica]
        gone = view.incarnation is not None and (replica, view.incarnation) in s.exited
        s = with_view(
            s,
            replica,
            ask=None if gone else view.ask,
            incarnation=running if running is not None else view.incarnation,
            down=running is None,
            lost=replica in event.lost,
        )
        if running is not None and view.ask is not None and view.ask.report.incarnation != running:
            s = with_view(s, replica, ask=None)
    return s, tuple(notes)
