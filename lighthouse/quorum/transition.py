"""One event in, one decision out: ``transition(state, event) -> (state, effects)``. No I/O, no clock.

A membership that works is left alone: the first request for a step settles its grant for that step. A round
(`membership.hold_round`) is held only when the ring of the current epoch is lost, or before the first epoch.
"""

from __future__ import annotations

from dataclasses import replace

from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Refused, Report
from lighthouse.quorum import rules
from lighthouse.quorum.commands import execute
from lighthouse.quorum.incarnations import admit, entitled, newest, number_of, outlived, record_exits, renew_leases
from lighthouse.quorum.membership import hold_round, overruled_attempts, without_overruled
from lighthouse.quorum.rules import Base
from lighthouse.quorum.state import (
    Asked,
    AskWithdrawn,
    Commanded,
    Effect,
    Event,
    LighthouseState,
    Note,
    OpenRequest,
    ProcessesReported,
    Reply,
    Step,
    Ticked,
    alive,
    answer,
    answer_settled,
    begin_anew,
    continue_grant,
    member,
    new_epoch,
    raise_head,
    store_behind,
    total,
    wanted,
    with_view,
)

# The end of the reason that rewound incarnations are refused with.
BEGIN_AGAIN = "all begin again from the newest checkpoint, older copies are dropped"


def transition(s: LighthouseState, event: Event) -> Step:
    """Decide what ``event`` changes.

    Args:
        s: What the lighthouse knows.
        event: What it is told; its times never go back.

    Returns:
        The next state, and the effects. The effects may be carried out only when the state is durable.
    """
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
            s, effects = execute(s, event)
            now = event.now
        case Ticked(now):
            effects = ()
    s, more = hold_round(s, now)
    return s, effects + more


def _asked(s: LighthouseState, request: OpenRequest, now: float) -> Step:
    """Note a replica's request, and answer it at once if the current membership settles it.

    The order of the checks matters: an incarnation that has exited or is fenced must not change anything; a store
    that is an older copy is recognized before its grant is used.
    """
    report = request.report
    me = report.replica
    view = s.views[me]
    who = (me, report.incarnation)
    unknown = view.incarnation != report.incarnation
    if who in s.exited or (unknown and outlived(who, s.exited)):
        return s, (Reply(me, request.id, Refused("this incarnation is known to have exited", 75)),)
    if _says_nothing_new(s, report):
        assert s.grant is not None
        return s, (Reply(me, request.id, continue_grant(s, report)),)
    if unknown or report.number > number_of(s, who):
        admitted = admit(s, who, now, report)
        if isinstance(admitted, str):
            return s, (Reply(me, request.id, Refused(admitted, 75)),)
        s = admitted
    if store_behind(s, report):
        s, note = begin_anew(s, report)
        s, effects = _asked(s, request, now)
        return s, (note, *effects)
    # The next grant is above every term and epoch that a member may have seen.
    if s.fresh and report.max_term >= s.term:
        s = replace(s, term=report.max_term + 1)
    epoch = max(s.epoch, report.epoch, report.after, report.state.commit_epoch)
    s = s if epoch == s.epoch else replace(s, epoch=epoch)
    request = replace(request, report=replace(report, number=number_of(s, who)))
    s = with_view(s, me, incarnation=report.incarnation, down=False, lost=False, ask=request, fetching=False)
    if report.departs and _may_leave_now(s, report):
        return answer(s, {me: Refused(f"replica {me} leaves on request", 0)})
    if s.rewound[me:] and 0 < number_of(s, who) <= s.rewound[me]:
        return answer(s, {me: Refused(BEGIN_AGAIN, 75, forget=True)})
    s = raise_head(s, report.state)
    if s.checkpoint and report.saved >= s.checkpoint:
        s = replace(s, checkpoint=0)
    if report.diverged and s.policy.on_divergence == "checkpoint":
        return _rewind(s, report, now)
    if report.diverged or s.diverged:
        return _diverged(s, report)
    if s.grant is None or report.state.step >= s.policy.steps or s.grant.member(me, report.incarnation) is None:
        return s, ()
    # A member needs a larger epoch than the grant's: its ring broke, so a round begins.
    if report.after >= s.grant.epoch:
        return (s, ()) if s.broken else (replace(s, broken=True, settled=0, since=now), ())
    return (s, ()) if s.broken else _settle(s, report, now)


def _says_nothing_new(s: LighthouseState, report: Report) -> bool:
    """Return whether a member asks for a settled step and reports nothing new: all but the first of each step do.

    This is the common case. It is answered without a change of the state, so nothing has to be stored.
    """
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
        and not state_id.newer(state, s.head)
        and not s.checkpoint
        and grant.member(report.replica, report.incarnation) is not None
    )


def _may_leave_now(s: LighthouseState, report: Report) -> bool:
    """Return whether a reporter that leaves is no member, and others know what it knows."""
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
    return state_id.newer(s.head, report.state) or (others and not state_id.newer(report.state, s.head))


def _rewind(s: LighthouseState, report: Report, now: float) -> Step:
    """End all present incarnations because their states differ and no majority tells whose state is right.

    They drop their copies. The incarnations after them begin with the newest checkpoint. None of the present ones
    is ever admitted again, because the lighthouse does not know which of them held the right state.
    """
    who = ",".join(map(str, report.diverged))
    why = f"replicas {who} hold different states at {report.doubt or report.state}, nobody can tell which is right"
    note = Note("RewindOrdered", f"{why}: {BEGIN_AGAIN}", {"replicas": list(report.diverged)})
    numbers = [[admitted.number for admitted in s.lives if admitted.replica == r] for r in range(s.policy.slots)]
    rewound = tuple(max(each, default=s.admissions) for each in numbers)
    s = replace(s, term=s.term + 1, rewound=rewound, rewinding=True, broken=True, settled=0, since=now)
    end = Refused(f"{why}: {BEGIN_AGAIN}", 75, forget=True)
    s, replies = answer(s, {r: end for r, v in enumerate(s.views) if v.ask is not None})
    return s, (note, *replies)


def _diverged(s: LighthouseState, report: Report) -> Step:
    """Halt the job because states differ and no majority tells whose state is right; nothing is overwritten.

    Every replica that asks is refused.
    """
    notes: tuple[Effect, ...] = ()
    if not s.diverged:
        who = ",".join(map(str, report.diverged))
        where = report.doubt or report.state
        why = f"replicas {who} hold different states at {where}, nobody can tell which is right"
        s = replace(s, diverged=report.diverged, halted=why)
        notes = (Note("JobHalted", why, {"replicas": list(report.diverged)}),)
    s, replies = answer(s, {r: Refused(s.halted, 75) for r, v in enumerate(s.views) if v.ask is not None})
    return s, (*notes, *replies)


def _settle(s: LighthouseState, report: Report, now: float) -> Step:
    """Settle the membership for the step that a member asks for first, on a ring that works.

    This is the moment to change the membership without a pause: the reporter holds the newest committed state, so
    newcomers join on it, members that have exited or leave drop out, and members that caught up contribute. If a
    newcomer knows a higher state, a round must decide instead.
    """
    assert s.grant is not None
    grant = s.grant
    holds = report.state.step + 1 == report.step
    if report.epoch < grant.epoch or report.step <= s.settled or not holds:
        return answer_settled(s)
    joiners = [v.ask for r, v in enumerate(s.views) if v.ask and grant.member(r, v.incarnation or "") is None]
    if any(rules.ahead(without_overruled(s, j.report), report.state) for j in joiners):
        return replace(s, broken=True, settled=0), ()
    # A newcomer that is not wanted is refused: no more is lost than by its death.
    unwanted = [j.report.replica for j in joiners if not wanted(s, j.report.replica)]
    s, turned_away = answer(s, {r: Refused(_unwanted(s, r), 0) for r in unwanted})
    # These cannot connect to another member; they are tried again when their pause is over.
    excluded = s.edges.excluded(now) - set(grant.ring)
    joiners = [j for j in joiners if j.report.replica not in unwanted and j.report.replica not in excluded]
    newcomers = {j.report.replica for j in joiners}  # an earlier incarnation of theirs may be a member still
    voids = rules.distinct_attempts(overruled_attempts(s, (j.report for j in joiners)))
    base = Base(report.state, None, voids)
    holders = {m.replica for m in grant.members if m.role == "contribute"} | set(report.equal) | {report.replica}
    gone = [m for m in grant.members if (m.replica, m.incarnation) in s.exited or m.replica in report.leaving]
    caught_up = [m for m in grant.members if m.role == "behind" and m.replica in holders]
    stale = [m for m in grant.members if m.replica in report.lagging and m.replica not in holders]
    left = [m for m in grant.members if m not in gone and m.replica not in newcomers]
    able = sum(m.replica in holders for m in left)
    size = total(s, len(left) + len(joiners))
    changed = bool(joiners or gone or caught_up or stale or size != grant.total) and able >= s.policy.min_replicas
    s = replace(s, settled=report.step)
    if not changed:
        s, replies = answer_settled(s)
        return s, (*turned_away, *replies)
    members = [replace(m, role="contribute" if m.replica in holders else "behind") for m in left]
    members += [member(ask, base) for ask in joiners]
    whys = (
        ("joined", [j.report.replica for j in joiners]),
        ("gone", [m.replica for m in gone]),
        ("caught up", [m.replica for m in caught_up]),
        ("needs a newer base", [m.replica for m in stale]),
    )
    told = [f"{what}: replica {','.join(map(str, ids))}" for what, ids in whys if ids]
    why = "; ".join([*told, *([f"{size} replicas are wanted"] if size != grant.total else [])])
    s, note = new_epoch(s, base, tuple(members), why)
    s, replies = answer_settled(s)
    return s, (*turned_away, note, *replies)


def _unwanted(s: LighthouseState, replica: int) -> str:
    """Return one line that says why a replica may not take part."""
    drained = replica in s.drained
    return f"replica {replica} is drained" if drained else f"replica {replica}: the job has {s.target} replicas"


def _processes(s: LighthouseState, event: ProcessesReported) -> Step:
    """Take a supervisor's word on what runs: the only evidence that counts as death."""
    s, leased = renew_leases(s, event)
    s, news = record_exits(s, event)
    notes: list[Effect] = [
        Note("ExitReported", "its supervisor saw it end", {"replica": replica, "incarnation": incarnation})
        for replica, incarnation in news
    ]
    notes += leased
    if news:
        s = replace(s, last_exit=event.now)
    for replica, running in event.running.items():
        view = s.views[replica]
        if not entitled(s, event.owner, replica):
            continue
        if running is None:
            if _contradicts(s, event, replica):
                continue
        elif running != view.incarnation:
            admitted = admit(s, (replica, running), event.now)
            if isinstance(admitted, str):
                continue
            s = admitted
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


def _contradicts(s: LighthouseState, event: ProcessesReported, replica: int) -> bool:
    """Return whether a supervisor that says "no process of this replica runs" knows only of older incarnations."""
    known = newest(s, replica)
    named = any(r == replica for r, _ in event.exited)
    if known is None or not named or (replica, known.incarnation) in event.exited:
        return False
    who = (replica, known.incarnation)
    return alive(s, who) and not outlived(who, event.exited | s.exited)
