"""Rounds: a new epoch after the ring broke or before the first one, and the end. Pure.

Silence never counts as death: whoever is silent is left out, but what it may hold is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import AttemptId, CommitRecord
from ft_hsdp.core.grant import Answer, CatchUp, Finish, Member, Refused, Report
from ft_hsdp.core.restart import doubled
from ft_hsdp.core.state_id import StateId
from lighthouse.quorum import rules
from lighthouse.quorum.edges import learn
from lighthouse.quorum.rules import Base, Incarnation
from lighthouse.quorum.state import (
    Effect,
    Evict,
    LighthouseState,
    Note,
    OpenRequest,
    Step,
    alive,
    answer,
    away,
    member,
    new_epoch,
    over,
    raise_head,
    serve,
    with_view,
)

PROMPT = 2  # epochs in a row without a step that are followed by the next one at once
PAUSE_S = 0.1  # before the one after that; each pause is twice as long as the one before
LONGEST_PAUSE_S = 5.0


def hold(s: LighthouseState, now: float) -> Step:
    """Form a new epoch if one is needed and possible; else say what is waited for."""
    if s.diverged:
        return s, ()
    finished, effects = _final(s, now)
    if effects or finished.finished:
        return finished, effects
    s = finished
    grant = s.grant
    if grant is not None and not s.broken and any(alive(s, (m.replica, m.incarnation)) for m in grant.members):
        return s, ()
    asks = {
        r: v.ask
        for r, v in enumerate(s.views)
        if v.ask is not None and (v.ask.report.state.step < s.policy.steps or not over(s))
    }
    if not asks:
        return s, ()
    members = {(m.replica, m.incarnation) for m in grant.members} if grant else set()
    if s.since is None:
        s = replace(s, since=now)
    assert s.since is not None
    patient = now < max(s.since, s.last_exit) + s.policy.return_wait_s
    silent = _silent(s, members, asks, patient)
    accused = _accused(asks)
    patience = _patience(s, silent, accused)
    if silent and (patience is None or now < s.since + patience):
        return _wait(s, f"waiting for replica {','.join(str(r) for r, _ in silent)}")
    pause_s = _pause(s)
    if now < s.since + pause_s:
        return _wait(s, f"{s.fruitless} epochs in a row made no step: the next one {pause_s:g} s after the last")
    s, broken = _edges(s, asks, now)
    s, granted = _form(s, asks, silent, accused, patient)
    granted = (*broken, *granted)
    late = (
        [(r, i) for r, i in silent if i is not None]
        if s.grant and s.since is not None and now >= s.since + s.policy.evict_s
        else []
    )
    evictions = tuple(Evict(r, i, f"silent for {s.policy.evict_s} s while its ring is broken") for r, i in late)
    return s, (*granted, *evictions)


def _silent(
    s: LighthouseState, members: set[Incarnation], asks: Mapping[int, OpenRequest], patient: bool
) -> list[tuple[int, str | None]]:
    """Who should have asked: at first every replica not known to be down, later the living members.

    The store may have been lost: replicas that are down and have lived may come back with committed steps.
    """
    if s.grant is None:
        lived = {r for r, _ in s.exited} if patient else set()
        veterans = any(a.report.max_term for a in asks.values())  # then the job may have been scaled, too
        return [
            (r, v.incarnation)
            for r, v in enumerate(s.views)
            if r not in asks
            and not v.lost
            and (not away(s, r) or (veterans and v.down is None and r not in s.drained))
            and (r in lived or v.down is not True)
        ]
    return sorted(m for m in members if alive(s, m) and m[0] not in asks and not s.views[m[0]].fetching)


def _accused(asks: Mapping[int, OpenRequest]) -> frozenset[int]:
    """Whom somebody who asks saw die or fall silent in the ring that broke."""
    return frozenset(r for a in asks.values() for r in a.report.suspects)


def _patience(
    s: LighthouseState, silent: Iterable[tuple[int, str | None]], accused: frozenset[int]
) -> float | None:
    """Seconds for the ``silent`` to ask: few for those who are suspects already; None: for ever."""
    if s.grant is None:
        return s.policy.start_wait_s
    graces = (s.policy.suspect_grace_s if r in accused else s.policy.silence_grace_s for r, _ in silent)
    return max(graces, default=0.0)


def _pause(s: LighthouseState) -> float:
    """Seconds before another epoch, where the last ones made no step and nobody died: no storm of them."""
    if s.grant is None or any(not alive(s, (m.replica, m.incarnation)) for m in s.grant.members):
        return 0.0
    return doubled(PAUSE_S, s.fruitless - PROMPT, LONGEST_PAUSE_S)


def _edges(s: LighthouseState, asks: Mapping[int, OpenRequest], now: float) -> Step:
    """Count the failed edges of the ring that broke; who is left out for them from now on."""
    if s.grant is None:
        return s, ()
    reports = {r: a.report for r, a in asks.items()}
    base = rules.highest(heard(s, r) for r in reports.values())
    able = {r for r, report in reports.items() if rules.role(report, base) == "contribute"} - s.edges.out(now)
    spared = {r for r in reports if len(able - {r}) >= max(1, s.policy.min_replicas)}
    edges, verdicts = learn(s.edges, s.grant, reports, spared, now, s.policy.edge_wait_s)
    return replace(s, edges=edges), tuple(Note("EdgeBroken", v.reason, v.facts) for v in verdicts)


def _wait(s: LighthouseState, why: str, before: Iterable[Effect] = ()) -> Step:
    """No more can be decided yet than what comes ``before``; the shell journals a reason once."""
    return s, (*before, Note("Waiting", why))


def _form(
    s: LighthouseState,
    asks: Mapping[int, OpenRequest],
    silent: list[tuple[int, str | None]],
    accused: frozenset[int],
    patient: bool,
) -> Step:
    """Grant a new epoch to all that ask, if nobody absent and alive could hold something newer.

    While it is ``patient`` this includes those who are started again: they may find the state that they held.
    """
    reports = {r: a.report for r, a in asks.items()}
    base = rules.highest(heard(s, r) for r in reports.values())
    base = replace(base, voids=rules.fences([*base.voids, *overruled_fences(s, reports.values())]))
    present = frozenset((r, report.incarnation) for r, report in reports.items())
    notes: list[Effect] = []
    missing = [r for r, _ in _unheard(s, present)]
    later = [r for r, v in enumerate(s.views) if patient and r not in reports and not v.lost and not _unused(s, r)]
    doubts = [r.doubt for r in reports.values() if r.doubt and state_id.newer(r.doubt, base.state)]
    if doubts and missing:
        return _wait(s, f"{doubts[0]} may be committed; replica {missing[0]} may hold it")
    doubts = [d for d in doubts if not rules.never(d, base.voids)]
    if doubts and later:
        return _wait(s, f"{doubts[0]} may be committed; replica {later[0]} may come back with it")
    if s.head is not None and state_id.newer(s.head, base.state):
        above = f"head {s.head} is above {base.state}"
        if missing:
            return _wait(s, f"{above}; replica {missing[0]} may hold it")
        if later:
            return _wait(s, f"{above}; replica {later[0]} may come back with it")
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
    blocked = rules.uncovered(s.epochs, s.exited, present)
    if blocked is not None:
        return _wait(s, f"epoch {blocked.number} has living members, none of them asks", notes)
    blocked = rules.uncovered(s.epochs, s.exited - _returning(s, later), present)
    if blocked is not None:
        return _wait(s, f"epoch {blocked.number} has members that may come back, none of them asks", notes)
    members = tuple(member(a, base) for a in asks.values())
    if base.state.step >= s.policy.steps:
        s, replies = _catch_up(s, base.state, members, "training is over")
        return s, (*notes, *replies)
    inside = tuple(m for m in members if m.replica not in s.edges.out())
    if sum(m.role == "contribute" for m in inside) >= max(1, s.policy.min_replicas):
        members = inside
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
    barred = sorted(set(asks) - {m.replica for m in members})
    if barred:
        why += f"; without replica {','.join(map(str, barred))}: it cannot connect to another one"
    if silent:
        why += f"; without replica {','.join(str(r) for r, _ in silent)}: silent"
        notes += [
            Note("ReplicaExcluded", "silent beyond its grace", {"replica": r, "suspected": r in accused})
            for r, _ in silent
        ]
    s, note = new_epoch(replace(s, rewinding=False), base, members, why)
    s, replies = serve(s)
    return s, (*notes, note, *replies)


def _catch_up(s: LighthouseState, base: StateId, members: tuple[Member, ...], why: str) -> Step:
    """Have ``members`` that are behind fetch ``base`` without a ring, and the others keep it for them.

    The others may hold nothing but the record that leads to it. They are told to apply it, so it is the head from
    now on.
    """
    s = raise_head(s, base)
    donors = tuple(m for m in members if m.role == "contribute")
    s, replies = answer(s, {m.replica: CatchUp(base, donors, why) for m in members})
    for m in members:
        s = with_view(s, m.replica, fetching=m.role == "behind")
    return s, replies


def _unheard(s: LighthouseState, present: frozenset[Incarnation]) -> list[Incarnation]:
    """Who may live and does not ask: members of remembered epochs, and replicas of which nothing is known."""
    asking = {r for r, _ in present}
    members = [i for e in s.epochs for i in e.members if alive(s, i) and i not in present]
    return members + [
        (r, "")
        for r, v in enumerate(s.views)
        if r not in asking and v.down is not True and not v.lost and not _unused(s, r)
    ]


def _unused(s: LighthouseState, replica: int) -> bool:
    """Whether a replica cannot hold anything: the job was never scaled to it, as far as anybody knows."""
    return not s.fresh and replica >= s.target and s.views[replica].incarnation is None


def _returning(s: LighthouseState, later: list[int]) -> frozenset[Incarnation]:
    """Exited members of remembered epochs whose replica may come ``later``: what they held may still be heard of.

    A replica that is not given up is started again, and may find the state that it held on its machine.
    """
    members = {i for e in s.epochs for i in e.members}
    back = {r for r, i in members if alive(s, (r, i))}
    return frozenset(m for m in members if m[0] in later and m[0] not in back)


def overruled(s: LighthouseState, record: CommitRecord | None) -> bool:
    """Whether a later decision was made without ``record``, so that it never committed and never will.

    The current grant, or the end, was decided with a member of every epoch before it. Had that one known a
    record to be in doubt, its state would be the one that was built on.
    """
    if s.grant is None or record is None or record.state_id in (s.grant.base, s.head):
        return False
    return record.epoch < s.grant.epoch or over(s)


def heard(s: LighthouseState, report: Report) -> Report:
    """``report`` as far as it counts."""
    return replace(report, prepared=None) if overruled(s, report.prepared) else report


def overruled_fences(s: LighthouseState, reports: Iterable[Report]) -> list[AttemptId]:
    """The attempts in ``reports`` that a later decision has overruled."""
    return [r.prepared.fence for r in reports if r.prepared is not None and overruled(s, r.prepared)]


def _ending(s: LighthouseState, report: Report) -> Answer:
    """The job is over: whoever comes back now lost a state that every replica had."""
    if s.head is not None and state_id.same(report.state, s.head):
        return Finish()
    return Refused(f"the job has ended: every replica had {s.head}", 0)


def _final(s: LighthouseState, now: float) -> Step:
    """Training is over: help those behind to the final state, end when every replica has it and none writes it."""
    if not over(s) or s.finished:
        if s.finished:
            return answer(s, {r: _ending(s, v.ask.report) for r, v in enumerate(s.views) if v.ask is not None})
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
