"""Decide: ``transition(state, event) -> (state, effects)``, the lighthouse's decisions. No I/O, no clock.

A membership that works is left alone: the first request for a step settles its grant at once. A round is held only
when the ring of the current epoch is of no more use, or before the first epoch.
"""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.core.assignment import Refused, Report
from lighthouse import quorum
from lighthouse.quorum import Base
from lighthouse.rounds import heard, hold, overruled_fences
from lighthouse.state import (
    Asked,
    AskWithdrawn,
    Effect,
    Event,
    Note,
    ProcessesReported,
    Reply,
    Request,
    State,
    Step,
    Ticked,
    answer,
    member,
    new_epoch,
    raise_head,
    serve,
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
        case Ticked(now):
            effects = ()
    s, more = hold(s, now)
    return s, effects + more


def _asked(s: State, request: Request, now: float) -> Step:
    """Note the ask; answer at once if the current membership settles it."""
    report = request.report
    me = report.replica
    view = s.views[me]
    if (me, report.incarnation) in s.exited:
        return s, (Reply(me, request.id, Refused("this incarnation is known to have exited", 75)),)
    if view.incarnation not in (None, report.incarnation) and not _superseded(s, me, report.incarnation):
        return s, (Reply(me, request.id, Refused(f"fenced: replica {me} has a newer incarnation", 75)),)
    if s.fresh and report.max_term >= s.term:
        s = replace(s, term=report.max_term + 1)
    epoch = max(s.epoch, report.epoch, report.after, report.state.commit_epoch)
    s = replace(s, epoch=epoch)
    s = with_view(s, me, incarnation=report.incarnation, down=False, lost=False, ask=request)
    s = raise_head(s, report.state)
    if report.diverged or s.diverged:
        return _diverged(s, report)
    if s.grant is None or report.state.step >= s.policy.steps or s.grant.member(me, report.incarnation) is None:
        return s, ()
    if report.after >= s.grant.epoch:
        return (s, ()) if s.broken else (replace(s, broken=True, settled=0, since=now), ())
    return (s, ()) if s.broken else _settle(s, report)


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


def _superseded(s: State, replica: int, incarnation: str) -> bool:
    """Whether ``incarnation`` is new: not in any epoch that is still remembered. Newest wins."""
    return all((replica, incarnation) not in e.members for e in s.epochs)


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
    voids = quorum.fences(overruled_fences(s, (j.report for j in joiners)))
    base = Base(report.state, None, voids)
    holders = {m.replica for m in grant.members if m.role == "contribute"} | set(report.equal) | {report.replica}
    gone = [m for m in grant.members if (m.replica, m.incarnation) in s.exited or m.replica in report.leaving]
    risen = [m for m in grant.members if m.role == "behind" and m.replica in holders]
    lags = [m for m in grant.members if m.replica in report.lagging and m.replica not in holders]
    able = sum(m.replica in holders for m in grant.members if m not in gone)
    changed = bool(joiners or gone or risen or lags) and able >= s.policy.min_replicas
    s = replace(s, settled=report.step)
    if not changed:
        return serve(s)
    stay = (m for m in grant.members if m not in gone)
    members = [replace(m, role="contribute" if m.replica in holders else "behind") for m in stay]
    members += [member(ask, base) for ask in joiners]
    whys = (
        ("joined", [j.report.replica for j in joiners]),
        ("gone", [m.replica for m in gone]),
        ("caught up", [m.replica for m in risen]),
        ("needs a newer base", [m.replica for m in lags]),
    )
    why = "; ".join(f"{what}: replica {','.join(map(str, ids))}" for what, ids in whys if ids)
    s, note = new_epoch(s, base, tuple(members), why)
    s, replies = serve(s)
    return s, (note, *replies)


def _processes(s: State, event: ProcessesReported) -> Step:
    """Take a supervisor's word on what runs: the only evidence that counts as death."""
    notes: list[Effect] = []
    for replica, incarnation in sorted(event.exited - s.exited):
        notes.append(
            Note("ExitReported", "its supervisor saw it end", {"replica": replica, "incarnation": incarnation})
        )
    if event.exited - s.exited:
        s = replace(s, exited=s.exited | event.exited, last_exit=event.now)
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
