"""Which membership is next: settled on a ring that works, or by a round; and the end of training. Pure.

`settle` changes the membership without a pause. A round (`hold_round`) forms the next epoch after the ring broke,
or the first one.

Silence never counts as death: a silent replica is left out of the next epoch, but a round still waits for the
state that it may hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import AttemptId, CommitRecord
from ft_hsdp.core.grant import Answer, CatchUp, Finish, Member, Refused, Report
from ft_hsdp.core.restart import doubled
from ft_hsdp.core.state_id import StateId
from lighthouse.quorum import rules, witnesses
from lighthouse.quorum.events import Effect, Evict, Note, OpenRequest
from lighthouse.quorum.rules import Base, Incarnation, record_failures, replace
from lighthouse.quorum.state import (
    LighthouseState,
    Step,
    alive,
    answer,
    answer_settled,
    away,
    continue_grant,
    member,
    new_epoch,
    raise_head,
    total,
    training_is_over,
    wanted,
    with_view,
)

PROMPT = 2  # so many epochs in a row without a step are followed by the next one at once
PAUSE_S = 0.1  # before the one after that; each pause is twice as long as the one before
LONGEST_PAUSE_S = 5.0


def settle(s: LighthouseState, report: Report, now: float) -> Step:
    """Settle the membership for the step that a member's ``report`` asks for first, on a ring that works.

    This is the moment to change the membership without a pause: the reporter holds the newest committed state,
    so newcomers join on it, members that have exited or leave drop out, and members that caught up contribute.
    If a newcomer knows a higher state, a round must decide instead. Returns the replies; ``now`` is in seconds
    of the lighthouse's clock.
    """
    assert s.grant is not None
    grant = s.grant
    known = not witnesses.above(report.state, s.head)
    if not (known and _leads(s, report)):
        asked = (v.ask.report for r, v in enumerate(s.views) if v.ask and grant.member(r, v.incarnation or ""))
        lead = next((o for o in asked if not witnesses.above(o.state, s.head) and _leads(s, o)), None)
        report, known = (report, known) if lead is None else (lead, True)
    if not _leads(s, report):
        return answer_settled(s)
    joiners = [
        v.ask
        for r, v in enumerate(s.views)
        if v.ask and grant.member(r, v.incarnation or "") is None and v.doubted != v.ask.report.state
    ]
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
    holders = {m.replica for m in grant.members if m.holds_base} | set(report.equal) | {report.replica}
    same = (v.ask.report for v in s.views if v.ask and v.ask.report.state == report.state)
    leaving = set(report.leaving).intersection(*(o.leaving for o in same))
    gone = [m for m in grant.members if (m.replica, m.incarnation) in s.exited or m.replica in leaving]
    caught_up = [m for m in grant.members if m.role == "behind" and m.replica in holders]
    stale = [m for m in grant.members if m.replica in report.lagging and m.replica not in holders]
    left = [m for m in grant.members if m not in gone and m.replica not in newcomers]
    able = sum(m.replica in holders for m in left)
    size = total(s, len(left) + len(joiners))
    changed = bool(joiners or gone or caught_up or stale or size != grant.total) and able >= s.policy.min_replicas
    if not known and changed:  # it waits for another member that confirms its state
        return s, turned_away
    if known or report.state.step == (s.head or grant.base).step + 1:
        s = replace(s, settled=report.step)
    if not changed:
        s, replies = answer_settled(s)
        s, more = answer(s, {report.replica: continue_grant(s, report)})
        return s, (*turned_away, *replies, *more)
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
    s, notes = new_epoch(s, base, tuple(members), why, refill=True)
    s, replies = answer_settled(s)
    return s, (*turned_away, *notes, *replies)


def _leads(s: LighthouseState, report: Report) -> bool:
    """Return whether a member asks, on the current ring, for a step that is not settled, and holds its base."""
    assert s.grant is not None
    return report.epoch >= s.grant.epoch > report.after and report.state.step + 1 == report.step > s.settled


def _unwanted(s: LighthouseState, replica: int) -> str:
    drained = replica in s.drained
    return f"replica {replica} is drained" if drained else f"replica {replica}: the job has {s.target} replicas"


def hold_round(s: LighthouseState, now: float) -> Step:
    """Grant the next epoch if one is needed and possible, else say what the lighthouse waits for.

    Nothing is needed while the ring works and a member of the grant lives, or after the job halted because
    states differ. `transition` calls this after every event but the withdrawal of a request. ``now`` is in
    seconds of the lighthouse's clock.

    Returns:
        The state, and the effects: a "Waiting" note with the reason, or the grant, its notes and the replies;
        members that stay silent beyond `Policy.evict_s` are evicted.
    """
    if s.diverged:
        return s, ()
    finished, effects = _end_training(s, now)
    if effects or finished.finished:
        return finished, effects
    s = finished
    grant = s.grant
    if grant is not None and not s.broken and any(alive(s, (m.replica, m.incarnation)) for m in grant.members):
        return s, ()
    asks = {
        r: v.ask
        for r, v in enumerate(s.views)
        if v.ask is not None and (v.ask.report.state.step < s.policy.steps or not training_is_over(s))
    }
    if not asks:
        return s, ()
    members = {(m.replica, m.incarnation) for m in grant.members} if grant else set()
    # A round is due: note when it began, and wait for the silent as long as their grace lasts.
    if s.since is None:
        s = replace(s, since=now)
    assert s.since is not None
    await_returns = now < max(s.since, s.last_exit) + s.policy.return_wait_s
    silent = _silent(s, members, asks, await_returns)
    suspected = _suspected(asks)
    grace_s = _grace_s(s, silent, suspected)
    if silent and (grace_s is None or now < s.since + grace_s):
        return _wait(s, f"waiting for replica {','.join(str(r) for r, _ in silent)}")
    pause_s = _pause_s(s)
    if now < s.since + pause_s:
        return _wait(s, f"{s.fruitless} epochs in a row made no step: the next one {pause_s:g} s after the last")
    s, broken = _count_edge_failures(s, asks, now)
    overdue = grant is not None and s.since is not None and now >= s.since + s.policy.evict_s
    evicted = frozenset(r for r, _ in silent) if overdue else frozenset()
    s, granted = _grant_or_wait(s, asks, silent, suspected, evicted, await_returns)
    granted = (*broken, *granted)
    late = [(r, i) for r, i in silent if i is not None] if overdue and s.since is not None else []
    evictions = tuple(Evict(r, i, f"silent for {s.policy.evict_s} s while its ring is broken") for r, i in late)
    return s, (*granted, *evictions)


def _silent(
    s: LighthouseState, members: set[Incarnation], asks: Mapping[int, OpenRequest], await_returns: bool
) -> list[tuple[int, str | None]]:
    """Return the replicas that should have asked, but have not, each with its incarnation if that is known.

    With a grant these are its living members; before the first one, all replicas that are not known to be down.

    Before the first grant the store may have been lost. So while returns are awaited, replicas that are down but
    have lived count, too: they may come back with committed steps. Replicas that were told to fetch do not
    count.
    """
    if s.grant is None:
        lived = {r for r, _ in s.exited} if await_returns else set()
        # A replica that had a grant before shows that a store was lost; it may have known of a larger target.
        had_grant = any(a.report.max_term for a in asks.values())
        return [
            (r, v.incarnation)
            for r, v in enumerate(s.views)
            if r not in asks
            and not v.lost
            and (not away(s, r) or (had_grant and v.down is None and r not in s.drained))
            and (r in lived or v.down is not True)
        ]
    return sorted(m for m in members if alive(s, m) and m[0] not in asks and not s.views[m[0]].fetching)


def _suspected(asks: Mapping[int, OpenRequest]) -> frozenset[int]:
    """Return the replicas that some asking member saw die or fall silent in the ring that broke."""
    return frozenset(r for a in asks.values() for r in a.report.suspects)


def _grace_s(
    s: LighthouseState, silent: Iterable[tuple[int, str | None]], suspected: frozenset[int]
) -> float | None:
    """Return how many seconds the round waits for the ``silent``; None: for ever.

    For suspects it is short, because the members have waited for them already.
    """
    if s.grant is None:
        return s.policy.start_wait_s
    graces = (s.policy.suspect_grace_s if r in suspected else s.policy.silence_grace_s for r, _ in silent)
    return max(graces, default=0.0)


def _pause_s(s: LighthouseState) -> float:
    """Return the seconds before another epoch if the last ones made no step although no member died.

    This keeps a fault that the lighthouse cannot see from causing a storm of epochs.
    """
    if s.grant is None or any(not alive(s, (m.replica, m.incarnation)) for m in s.grant.members):
        return 0.0
    return doubled(PAUSE_S, s.fruitless - PROMPT, LONGEST_PAUSE_S)


def _count_edge_failures(s: LighthouseState, asks: Mapping[int, OpenRequest], now: float) -> Step:
    """Count the failed edges of the ring that broke, and leave replicas out that cannot connect."""
    if s.grant is None:
        return s, ()
    reports = {r: a.report for r, a in asks.items()}
    base = rules.highest(without_overruled(s, r) for r in reports.values())
    able = {r for r, report in reports.items() if rules.role(report, base) == "contribute"} - s.edges.excluded(now)
    spared = {r for r in reports if len(able - {r}) >= max(1, s.policy.min_replicas)}
    edges, verdicts = record_failures(s.edges, s.grant, reports, spared, now, s.policy.edge_wait_s)
    return replace(s, edges=edges), tuple(Note("EdgeBroken", v.reason, v.facts) for v in verdicts)


def _wait(s: LighthouseState, why: str, before: Iterable[Effect] = ()) -> Step:
    """Return the effects ``before`` and a "Waiting" note with the reason; the caller journals a reason once."""
    return s, (*before, Note("Waiting", why))


def _grant_or_wait(
    s: LighthouseState,
    asks: Mapping[int, OpenRequest],
    silent: list[tuple[int, str | None]],
    suspected: frozenset[int],
    evicted: frozenset[int],
    await_returns: bool,
) -> Step:
    """Grant a new epoch to all that ask, if no absent replica that may live could hold something newer.

    The checks, in order: a state that may be committed but that no asking replica holds; a head above every
    state that is reported; an epoch of which no member asks; training that is over; too few replicas that hold
    the base.

    Who is ``silent`` should have asked, and is waited for no longer; the ``evicted`` ones are to end. Members saw
    the ``suspected`` ones die or fall silent. With ``await_returns`` those that are started again are waited for:
    they may find the state that they had.
    """
    present = frozenset((r, a.report.incarnation) for r, a in asks.items())
    overruled = overruled_attempts(s, (a.report for a in asks.values()))
    judged = witnesses.judge(s, {r: without_overruled(s, a.report) for r, a in asks.items()}, evicted)
    s, doubted = witnesses.doubt(s, judged.doubted)
    notes: list[Effect] = [*doubted]
    if judged.open or not judged.believed:
        return _wait(s, judged.open or "no report is confirmed by another one", notes)
    reports, asks = judged.believed, {r: asks[r] for r in judged.believed}
    base = rules.highest(reports.values())
    base = replace(base, voids=rules.distinct_attempts([*base.voids, *overruled]))
    unheard = [r for r, _ in _unheard(s, present)]
    may_return = [
        r
        for r, v in enumerate(s.views)
        if await_returns and r not in reports and not v.lost and not _never_started(s, r)
    ]
    # A state that may be committed, but whose base no asking replica holds.
    doubts = [r.doubt for r in reports.values() if r.doubt and state_id.newer(r.doubt, base.state)]
    if doubts and unheard:
        return _wait(s, f"{doubts[0]} may be committed; replica {unheard[0]} may hold it")
    doubts = [d for d in doubts if not rules.cannot_commit(d, base.voids)]
    if doubts and may_return:
        return _wait(s, f"{doubts[0]} may be committed; replica {may_return[0]} may come back with it")
    # A committed state that no asking replica holds.
    if s.head is not None and state_id.newer(s.head, base.state):
        above = f"head {s.head} is above {base.state}"
        if unheard:
            return _wait(s, f"{above}; replica {unheard[0]} may hold it")
        if may_return:
            return _wait(s, f"{above}; replica {may_return[0]} may come back with it")
        # One lost step is repeated from its base. More than one is the policy's to decide.
        lost = s.head.step - base.state.step
        given_up = s.policy.on_lost_head == "rollback" or (s.rewinding and base.state.step > 0)
        if not rules.follows(s.head, base.state, s.epochs) and not given_up:
            why = f"no copy of the head {s.head} is left; the highest state is {base.state}"
            if s.rewinding:
                why = "there is no checkpoint to begin again from, after replicas held different states"
            elif s.policy.on_lost_head == "wait":
                return _wait(s, why)
            told = () if s.halted else (Note("JobHalted", why),)
            s, replies = answer(replace(s, halted=why), {r: Refused(why, 75) for r in asks})
            return s, (*told, *replies)
        why = f"every holder of {s.head} has exited; back by {lost} to {base.state}"
        notes.append(Note("HeadRolledBack", why, {"steps": lost}))
        s = replace(s, head=base.state if base.state.step else None)
        s = replace(s, checkpoint=min(s.checkpoint, base.state.step + 1))
    # A member of each remembered epoch must ask, unless all members of that epoch have exited.
    blocked = rules.uncovered(s.epochs, s.exited, present)
    if blocked is not None:
        return _wait(s, f"epoch {blocked.number} has living members, none of them asks", notes)
    blocked = rules.uncovered(s.epochs, s.exited - _returning(s, may_return), present)
    if blocked is not None:
        return _wait(s, f"epoch {blocked.number} has members that may come back, none of them asks", notes)
    members = tuple(member(a, base) for a in asks.values())
    if base.state.step >= s.policy.steps:
        s, replies = _catch_up(s, base.state, members, "training is over")
        return s, (*notes, *replies)
    # Replicas with failed connections are left out only if enough others hold the base.
    inside = tuple(m for m in members if m.replica not in s.edges.excluded())
    if sum(m.role == "contribute" for m in inside) >= max(1, s.policy.min_replicas):
        members = inside
    # Too few replicas hold the base: those that are behind fetch it without a ring.
    able = sum(m.role == "contribute" for m in members)
    if able < s.policy.min_replicas:
        why = f"{able} replicas hold {base.state}, min_replicas is {s.policy.min_replicas}"
        fetchers = [str(m.replica) for m in members if m.role == "behind"]
        if not fetchers:
            return _wait(s, why, notes)
        why += f"; replica {','.join(fetchers)} fetches it"
        s, replies = _catch_up(s, base.state, members, why)
        return s, (*notes, Note("Waiting", why), *replies)
    why = "first epoch" if s.grant is None else f"the ring of epoch {s.grant.epoch} broke"
    excluded = sorted(set(asks) - {m.replica for m in members})
    if excluded:
        why += f"; without replica {','.join(map(str, excluded))}: it cannot connect to another one"
    if silent:
        why += f"; without replica {','.join(str(r) for r, _ in silent)}: silent"
        notes += [
            Note("ReplicaExcluded", "silent beyond its grace", {"replica": r, "suspected": r in suspected})
            for r, _ in silent
        ]
    refill = s.policy.units.refill == "same_step"
    s, granted = new_epoch(replace(s, rewinding=False), base, members, why, refill)
    s, replies = answer_settled(s)
    return s, (*notes, *granted, *replies)


def _catch_up(s: LighthouseState, base: StateId, members: tuple[Member, ...], why: str) -> Step:
    """Have ``members`` that are behind fetch ``base`` without a ring, and the others keep it for them.

    The others may hold nothing but the record that leads to it. They are told to apply it, so it is the head
    from now on.
    """
    s = raise_head(s, base)
    donors = tuple(m for m in members if m.role == "contribute")
    s, replies = answer(s, {m.replica: CatchUp(base, donors, why) for m in members})
    for m in members:
        s = with_view(s, m.replica, fetching=m.role == "behind")
    return s, replies


def _unheard(s: LighthouseState, present: frozenset[Incarnation]) -> list[Incarnation]:
    """Return who may live and does not ask: members of remembered epochs, and replicas not heard of yet."""
    asking = {r for r, _ in present}
    members = [i for e in s.epochs for i in e.members if alive(s, i) and i not in present]
    return members + [
        (r, "")
        for r, v in enumerate(s.views)
        if r not in asking and v.down is not True and not v.lost and not _never_started(s, r)
    ]


def _never_started(s: LighthouseState, replica: int) -> bool:
    """Return whether a replica cannot hold any state: the job was never scaled to it, by what the store says."""
    return not s.fresh and replica >= s.target and s.views[replica].incarnation is None


def _returning(s: LighthouseState, may_return: list[int]) -> frozenset[Incarnation]:
    """Return the exited members of remembered epochs whose replica may come back with the state that they had.

    A replica that is not given up is started again, and may find a copy of its state on its machine.
    """
    members = {i for e in s.epochs for i in e.members}
    back = {r for r, i in members if alive(s, (r, i))}
    return frozenset(m for m in members if m[0] in may_return and m[0] not in back)


def overruled(s: LighthouseState, record: CommitRecord | None) -> bool:
    """Return whether a later decision was made without ``record``, so that it never committed and never will.

    The current grant, or the end of training, was decided with a member of every earlier epoch present. Had that
    member known the record to be in doubt, the decision would have been built on its state.
    """
    if s.grant is None or record is None or record.state_id in (s.grant.base, s.head):
        return False
    return record.epoch < s.grant.epoch or training_is_over(s)


def without_overruled(s: LighthouseState, report: Report) -> Report:
    """Return ``report`` without its prepared record if that is overruled."""
    return replace(report, prepared=None) if overruled(s, report.prepared) else report


def overruled_attempts(s: LighthouseState, reports: Iterable[Report]) -> list[AttemptId]:
    """Return the attempts of prepared records in ``reports`` that a later decision has overruled."""
    return [r.prepared.fence for r in reports if r.prepared is not None and overruled(s, r.prepared)]


def _answer_after_end(s: LighthouseState, report: Report) -> Answer:
    """Return the answer after the end: a replica that comes back without the final state has lost it."""
    if s.head is not None and state_id.same(report.state, s.head):
        return Finish()
    return Refused(f"the job has ended: every replica had {s.head}", 0)


def _end_training(s: LighthouseState, now: float) -> Step:
    """Help replicas that are behind to the final state; end the job when all have it and write nothing.

    The wait for the others ends `Policy.final_wait_s` after the first replica was seen with the final state.
    """
    if not training_is_over(s) or s.finished:
        if s.finished:
            return answer(
                s, {r: _answer_after_end(s, v.ask.report) for r, v in enumerate(s.views) if v.ask is not None}
            )
        return s, ()
    head = s.head
    assert head is not None
    have = {r: v.ask for r, v in enumerate(s.views) if v.ask and state_id.same(v.ask.report.state, head)}
    if not have:
        return s, ()
    if s.final_since is None:
        s = replace(s, final_since=now)
    assert s.final_since is not None
    late = now >= s.final_since + s.policy.final_wait_s
    done = {r for r, asked in have.items() if not asked.report.writing}
    if late or all(r in done or v.lost or away(s, r) for r, v in enumerate(s.views)):
        s, replies = answer(replace(s, finished=True), {r: Finish() for r in have})
        return s, (Note("JobFinished", f"final state {head}"), *replies)
    donors = tuple(replace(member(a, Base(head, None, ())), role="contribute") for a in have.values())
    rest = {r: CatchUp(head, donors, "training is over") for r, v in enumerate(s.views) if v.ask and r not in have}
    return answer(s, rest)
