"""One event in, one decision out: ``transition(state, event) -> (state, effects)``. No I/O, no clock.

The rules:

1. A membership that works is left alone: the first request for a step settles its grant for that step
   (`membership.settle`). A round (`membership.hold_round`) is held only before the first epoch, or when the ring
   of the current epoch is lost.
2. A report counts only if its incarnation is admitted. The lighthouse numbers an incarnation when it first hears
   of it. The grant tells the member its number, and its reports carry it.
3. An incarnation replaces another one of its replica only if it has the larger number. The numbers travel with
   the reports, so they outlive a restart of the lighthouse and an older store.
4. An incarnation is called REPLICA-RUN-RESTARTS. A run starts the next one when all processes of the one before
   have ended, so the newest exit of a run stands for the exits before it.
5. An exit is remembered as long as one of these holds, which bounds the table: its incarnation is a member of a
   remembered epoch, or it is the newest exit of a run that is still named.
6. What runs of a replica that is placed on hosts is said by `lighthouse.placement` alone.

Example: replica 1 runs as 1-a-0, which is admitted as number 4. It exits twice: 1-a-1 gets number 5, 1-a-2
number 6. The exit of 1-a-1 stands for that of 1-a-0 (rule 4). A frozen 1-a-0 wakes up and asks with number 4: it
is refused, for 4 is below 6 (rule 3). Another run starts 1-b-0, which gets number 7; then the exits of run "a" are
dropped (rule 5).
"""

from __future__ import annotations

from collections.abc import Iterable

from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Refused, Report
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.core.restart import IncarnationId
from lighthouse.quorum.commands import execute, on_host
from lighthouse.quorum.events import (
    PLACEMENT,
    Asked,
    AskWithdrawn,
    Commanded,
    Effect,
    Event,
    HostClosed,
    Note,
    OpenRequest,
    ProcessesReported,
    Reply,
    Ticked,
    Withdrawn,
)
from lighthouse.quorum.membership import hold_round, settle
from lighthouse.quorum.rules import AdmittedIncarnation, Incarnation, Spread, replace
from lighthouse.quorum.state import (
    LighthouseState,
    Step,
    alive,
    answer,
    begin_anew,
    continue_grant,
    is_placed,
    store_behind,
    wanted,
    with_view,
)
from lighthouse.quorum.witnesses import above, agree, hear, vouched

REMEMBERED = 8  # incarnations of one replica, of different runs; older ones report the number that they were told

# The end of the reason that rewound incarnations are refused with.
BEGIN_AGAIN = "all begin again from the newest checkpoint, older copies are dropped"


def transition(s: LighthouseState, event: Event) -> Step:
    """Return the state after ``event``, whose times never go back, and the effects.

    They may be carried out only when the state is durable.
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
        case Commanded(action="host-lost", host=host, now=now):
            s, effects = _processes(s, _nothing_runs(now, on_host(s, host)))
        case Commanded():
            s, effects = execute(s, event)
            now = event.now
        case Ticked(now):
            s, effects = _processes(s, _nothing_runs(now)) if s.spread else (s, ())
        case HostClosed(now=now) | Withdrawn(now=now):  # `placement` decides what follows
            return s, ()
    s, more = hold_round(s, now)
    return s, effects + more


def _asked(s: LighthouseState, request: OpenRequest, now: float) -> Step:
    """Note a replica's request, and answer it at once if the current membership settles it.

    The order of the checks matters: an incarnation that has exited or is fenced must not change anything; a
    store that is an older copy is recognized before its grant is used.
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
        admitted = admit(s, who, report)
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
    forget = {"claim": None, "doubted": None} if unknown else {}
    here = {"incarnation": report.incarnation, "down": False, "lost": False, "ended": False}
    s = with_view(s, me, ask=request, fetching=False, **here, **forget)
    if report.departs and _may_leave_now(s, report):
        return answer(s, {me: Refused(f"replica {me} leaves on request", 0)})
    if s.rewound[me:] and 0 < number_of(s, who) <= s.rewound[me]:
        return answer(s, {me: Refused(BEGIN_AGAIN, 75, forget=True)})
    if view.doubted == report.state and not unknown and _left_out(s, report):
        why = f"only replica {me} reports {report.state}, and it repeats that: it begins again"
        return answer(s, {me: Refused(why, 75)})
    s, doubts = hear(s, report)
    s, effects = _heard(s, report, now)
    return s, (*doubts, *effects)


def _left_out(s: LighthouseState, report: Report) -> bool:
    """Return whether a replica repeats a state that was doubted, while others go on without it."""
    member = s.grant is not None and s.grant.member(report.replica, report.incarnation) is not None
    return s.grant is not None and not (member or vouched(s, report.state, report.replica))


def _heard(s: LighthouseState, report: Report, now: float) -> Step:
    """Decide what follows from a report whose state was compared with the head."""
    me = report.replica
    if s.checkpoint and s.checkpoint <= report.saved <= report.state.step:
        s = replace(s, checkpoint=0)
    if s.diverged or agree(s, report):
        return _split(s, report, now)
    if s.grant is None or s.grant.member(me, report.incarnation) is None:
        return s, ()
    if report.state.step >= s.policy.steps:
        # The others are to confirm the final state; no ring is needed any more.
        lone = above(report.state, s.head) and not s.broken
        return (replace(s, broken=True, settled=0, since=now), ()) if lone else (s, ())
    # A member needs a larger epoch than the grant's: its ring broke, so a round begins.
    if report.after >= s.grant.epoch:
        return (s, ()) if s.broken else (replace(s, broken=True, settled=0, since=now), ())
    return (s, ()) if s.broken else settle(s, report, now)


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
        and (report.doubt is None or not state_id.newer(report.doubt, s.head))
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


def _split(s: LighthouseState, report: Report, now: float) -> Step:
    """End or halt what cannot go on because states differ, as the operator chose."""
    rewinds = report.diverged and s.policy.on_divergence == "checkpoint"
    return _rewind(s, report, now) if rewinds else _diverged(s, report)


def _rewind(s: LighthouseState, report: Report, now: float) -> Step:
    """End all present incarnations because their states differ and no majority tells whose state is right.

    They drop their copies. The incarnations after them begin with the newest checkpoint. None of the present
    ones is ever admitted again, because the lighthouse does not know which of them held the right state.
    """
    who = ",".join(map(str, report.diverged))
    why = (
        f"replicas {who} hold different states at {report.doubt or report.state}, no majority tells which is right"
    )
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
        why = f"replicas {who} hold different states at {where}, no majority tells which is right"
        s = replace(s, diverged=report.diverged, halted=why)
        notes = (Note("JobHalted", why, {"replicas": list(report.diverged)}),)
    s, replies = answer(s, {r: Refused(s.halted, 75) for r, v in enumerate(s.views) if v.ask is not None})
    return s, (*notes, *replies)


def _processes(s: LighthouseState, event: ProcessesReported) -> Step:
    """Take the word of who started processes on what runs: the only evidence that counts as death."""
    s, over = _hear_machines(s, event)
    torn = frozenset(each.who for each in over)
    stopped = {each.who[0] for each in over if any(said.done for _, said in each.heard)}
    down: dict[int, str | None] = dict.fromkeys(replica for replica, _ in torn)
    event = replace(event, running={**down, **event.running}, ended=event.ended | stopped)
    exited = (who for who in event.exited | torn if entitled(s, event.owner, who[0]))
    event = replace(event, exited=frozenset(exited))
    s, news = record_exits(s, event)
    notes: list[Effect] = [
        Note(
            "ExitReported",
            "none of its hosts that are heard has a living rank" if who in torn else "who started it saw it end",
            {"replica": who[0], "incarnation": who[1]},
        )
        for who in news
    ]
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
            admitted = admit(s, (replica, running))
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
            lost=replica in event.lost or replica in event.ended,
            ended=running is None and replica in event.ended,
            **({} if running in (None, view.incarnation) else {"claim": None, "doubted": None}),
        )
        if running is not None and view.ask is not None and view.ask.report.incarnation != running:
            s = with_view(s, replica, ask=None)
    for view in s.views if news else ():  # whose word counts alone now?
        if view.ask is not None:
            s, doubts = hear(s, view.ask.report)
            notes += doubts
            if not (s.diverged or s.rewinding) and agree(s, view.ask.report):
                s, ended = _split(s, view.ask.report, event.now)
                notes += ended
    members = [m.replica for m in s.grant.members] if s.grant is not None else []
    done = [r for r in members if s.views[r].ended]
    absent = [r for r in members if s.views[r].down and not wanted(s, r)]  # sent away, and not back since
    if done and not s.finished and {*done, *absent} == {*members}:
        s = replace(s, finished=True)  # no other replica trains: what still starts is told that it comes too late
        notes.append(Note("JobFinished", f"the scripts of all replicas have ended, at {s.head}"))
    return s, tuple(notes)


def _nothing_runs(now: float, machines: tuple[MachineRanks, ...] = ()) -> ProcessesReported:
    """Return a report of nobody's replicas, with what ``machines`` say."""
    return ProcessesReported({}, frozenset(), frozenset(), now, machines=machines)


def _hear_machines(s: LighthouseState, event: ProcessesReported) -> tuple[LighthouseState, list[Spread]]:
    """Take note of machines of incarnations; return those that have exited now."""
    if event.owner:  # placement knows nothing of them
        return s, []
    known = {each.who: each for each in s.spread}
    for said in event.machines:
        each = known.get(said.who, Spread(event.now, ()))
        heard = {before.machine: (at, before) for at, before in each.heard}
        if said.machine in heard or len(heard) < said.machines:
            _, before = heard.get(said.machine, (0.0, said))
            both = replace(said, gone=said.gone or before.gone, done=said.done or before.done)
            heard[said.machine] = event.now, both
        known[said.who] = replace(each, heard=tuple(heard[machine] for machine in sorted(heard)))
    silence_s, members = s.policy.evict_s, {member for epoch in s.epochs for member in epoch.members}
    over = [each for each in known.values() if each.exited(event.now, silence_s) and entitled(s, "", each.who[0])]
    awaited = sorted(known.keys() - s.exited - {each.who for each in over})
    kept = tuple(known[who] for who in awaited if who in members or number_of(s, who))
    return (s if kept == s.spread else replace(s, spread=kept)), over


def _contradicts(s: LighthouseState, event: ProcessesReported, replica: int) -> bool:
    """Return whether a supervisor that says "no process of this replica runs" knows only of older incarnations."""
    known = newest(s, replica)
    named = any(r == replica for r, _ in event.exited)
    if known is None or not named or (replica, known.incarnation) in event.exited:
        return False
    who = (replica, known.incarnation)
    return alive(s, who) and not outlived(who, event.exited | s.exited)


# Incarnations: which one of a replica counts, which exits are remembered, who may start the next one.


def run_of(incarnation: str) -> tuple[str, int]:
    """Return the run of an ``incarnation``, REPLICA-RUN-RESTARTS, and how often the replica was restarted in it.

    Runs of different replicas may have one name. A text that is no name of an incarnation is a run of its own.
    """
    name = IncarnationId.parse(incarnation)
    return (incarnation, 0) if name is None else (name.run_id, name.restarts)


def outlived(who: Incarnation, others: Iterable[Incarnation]) -> bool:
    """Return whether one of ``others`` is a later incarnation of the same run: then ``who`` has exited."""
    run, restarts = run_of(who[1])
    lives = (run_of(incarnation) for replica, incarnation in others if replica == who[0])
    return any(theirs == run and number > restarts for theirs, number in lives)


def record_exits(s: LighthouseState, event: ProcessesReported) -> tuple[LighthouseState, list[Incarnation]]:
    """Return the state with the exits that a supervisor's ``event`` names, and the new ones, sorted."""
    news = sorted(who for who in event.exited - s.exited if not outlived(who, s.exited))
    needed = {m for epoch in s.epochs for m in epoch.members}
    needed |= {(m.replica, m.incarnation) for m in s.grant.members} if s.grant else set()
    known = s.exited | set(news) | {m for m in needed if outlived(m, news)}
    newest: dict[tuple[int, str], int] = {}
    for replica, incarnation in known:
        run, restarts = run_of(incarnation)
        newest[replica, run] = max(restarts, newest.get((replica, run), 0))

    def matters(who: Incarnation) -> bool:
        replica, incarnation = who
        run, restarts = run_of(incarnation)
        current = event.running.get(replica) or s.views[replica].incarnation or ""
        named = who in event.exited or replica not in event.running or run_of(current)[0] == run
        return who in needed or (named and newest[replica, run] == restarts)

    exited = frozenset(filter(matters, known))
    return (s if exited == s.exited else replace(s, exited=exited)), news


def newest(s: LighthouseState, replica: int) -> AdmittedIncarnation | None:
    """Return the incarnation of a replica that was admitted last; None if none is known."""
    return max(
        (admitted for admitted in s.lives if admitted.replica == replica),
        key=lambda admitted: admitted.number,
        default=None,
    )


def admit(s: LighthouseState, who: Incarnation, report: Report | None = None) -> LighthouseState | str:
    """Make ``who`` the newest incarnation of its replica, or say why it cannot be that.

    Args:
        s: What the lighthouse knows.
        who: The incarnation that asks, or that is said to run.
        report: Its own report, if it is the one that asks.

    Returns:
        The state in which it has a number, or one line that says why the incarnation must end.
    """
    replica, incarnation = who
    known = newest(s, replica)
    mine = number_of(s, who)
    number = max(mine, report.number if report is not None else 0)
    fenced = f"fenced: replica {replica} has a newer incarnation"
    if known is not None and known.incarnation != incarnation:
        if outlived(who, ((admitted.replica, admitted.incarnation) for admitted in s.lives)):
            return f"{fenced}, of the same run: {known.incarnation}"
        if number and number <= known.number:
            return (
                f"{fenced}: {incarnation} was admitted as number {number}, {known.incarnation} as {known.number}"
            )
        if not number and report is not None and (report.epoch or report.max_term):
            return f"{fenced}: {incarnation} was granted before {known.incarnation} was admitted"
    if not number and is_placed(s, replica) and s.placement.replicas[replica].incarnation != incarnation:
        return f"replica {replica} runs on hosts that have not started {incarnation}"
    if not number:
        number = max(s.admissions, known.number if known is not None else 0) + 1
    if number == mine:
        return s
    return replace(s, lives=_with(s.lives, AdmittedIncarnation(replica, incarnation, number)))


def number_of(s: LighthouseState, who: Incarnation) -> int:
    """Return the number with which the incarnation ``who`` was admitted; 0 if it was not, or that is forgotten."""
    return next((admitted.number for admitted in s.lives if (admitted.replica, admitted.incarnation) == who), 0)


def _with(lives: tuple[AdmittedIncarnation, ...], new: AdmittedIncarnation) -> tuple[AdmittedIncarnation, ...]:
    """Return ``lives`` with ``new``: of one run only the newest, of one replica the newest `REMEMBERED`."""
    run = run_of(new.incarnation)[0]
    others = [admitted for admitted in lives if admitted.replica != new.replica]
    same = [
        admitted
        for admitted in lives
        if admitted.replica == new.replica and run_of(admitted.incarnation)[0] != run
    ]
    kept = sorted([*same, new], key=lambda admitted: admitted.number)[-REMEMBERED:]
    return tuple(sorted([*others, *kept], key=lambda admitted: (admitted.replica, admitted.number)))


def entitled(s: LighthouseState, owner: str, replica: int) -> bool:
    """Return whether the word of ``owner`` on what runs of a ``replica`` counts.

    A rank that reports of itself has the owner "": its word counts where no host reports.
    """
    return owner == PLACEMENT or not is_placed(s, replica)
