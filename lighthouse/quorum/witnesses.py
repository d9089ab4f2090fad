"""Whose word counts: no single report changes what all others do. Pure.

A committed step is known to every member of its ring, because each has voted on it. So a state above the head
counts as soon as two replicas name it. The word of one replica counts alone only if no other member of the grant
may live. A round also believes one replica for the step right after the head, if its report has the record that
leads there: while the others are silent, and while no two of them say that they did not vote for it.
The hash of the record is the name of the state, so no single wrong value fits.

What a member reports is *doubted* if it is above the head, and a member that has left the same ring does not know
of it. A doubted replica is left out of a new membership, and the others go on. It is believed again when it
reports what the others know. The doubt ends with its incarnation.

Example, head (1, 7): replica 0 reports (1, 3990). While the ring works it is told to go on, and nothing changes.
When the ring breaks, replicas 1 and 2 report (1, 8): two name it, so the next epoch builds on (1, 8), without 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.grant import Report
from ft_hsdp.core.state_id import StateId
from lighthouse.quorum.events import Effect, Note
from lighthouse.quorum.rules import cannot_commit, replace
from lighthouse.quorum.state import LighthouseState, Step, alive, raise_head, with_view

FRUITLESS = 3  # after more epochs than these without a step, one replica is enough to say that states differ


def named(report: Report) -> tuple[StateId, ...]:
    """Return the states that by its ``report`` a replica has committed, or has voted to commit."""
    prepared = () if report.prepared is None else (report.prepared.state_id,)
    return (report.state, *prepared, *(() if report.doubt is None else (report.doubt,)))


def above(state: StateId, head: StateId | None) -> bool:
    """Return whether ``state`` is above the head; the initial state never is."""
    return state.step > 0 and (head is None or state_id.newer(state, head))


def certified(report: Report) -> bool:
    """Return whether the record in a report leads to exactly the state that it reports."""
    return report.committed is not None and report.committed.state_id == report.state


def follows_head(s: LighthouseState, report: Report) -> bool:
    """Return whether the record in a report leads from the head, or the grant's base, to the reported state."""
    return report.committed is not None and _next(s, report.committed) and certified(report)


def _next(s: LighthouseState, record: CommitRecord) -> bool:
    """Return whether a record builds on the head, or on the grant's base."""
    known = s.head or (s.grant.base if s.grant else None)
    return known is not None and record.prev == known.lineage


def others(s: LighthouseState, replica: int, epoch: int) -> dict[int, str]:
    """Return the other members of an epoch that may live, by replica.

    If the epoch is not remembered they are those of the grant.
    """
    members = next((e.members for e in s.epochs if e.number == epoch), None)
    if members is None:
        members = tuple((m.replica, m.incarnation) for m in s.grant.members) if s.grant else ()
    return {r: incarnation for r, incarnation in members if r != replica and alive(s, (r, incarnation))}


def alone(s: LighthouseState, report: Report) -> bool:
    """Return whether only the sender of ``report`` may live, or all others leave with the record's step."""
    rest = others(s, report.replica, report.state.commit_epoch)
    if rest and set(report.leaving).issuperset(rest):
        return follows_head(s, report)
    return s.grant is not None and not rest and not _uncertain(s, report)


def _member(s: LighthouseState, report: Report) -> bool:
    """Return whether the reporter is a member of the grant. If not, it may have found its state on its machine."""
    return s.grant is not None and s.grant.member(report.replica, report.incarnation) is not None


def vouched(s: LighthouseState, state: StateId, replica: int) -> bool:
    """Return whether another replica than ``replica`` names ``state``, or has claimed it."""
    rest = (v for r, v in enumerate(s.views) if r != replica)
    return any(v.claim == state or (v.ask is not None and state in named(v.ask.report)) for v in rest)


def agree(s: LighthouseState, report: Report) -> bool:
    """Return whether a report of states that differ counts.

    Another replica says the same, or no other may live, or it is said again and again and no step is committed.
    """
    me, split = report.replica, report.diverged
    rest = (v.ask for r, v in enumerate(s.views) if r != me)
    again = s.fruitless > FRUITLESS or any(ask is not None and ask.report.diverged == split for ask in rest)
    if not split or again:
        return bool(split)
    if s.grant is None:
        return all(r == me or s.views[r].down for r in split)
    return set(split) <= set(s.grant.ring) and not others(s, me, s.grant.epoch)


def hear(s: LighthouseState, report: Report) -> Step:
    """Raise the head to what a ``report`` and another one name; note what this one claims above it.

    Returns an event for each claim that the new head shows to be wrong.
    """
    me, state = report.replica, report.state
    heads = [x for x in named(report) if above(x, s.head) and x in _claims(s, me)]
    if above(state, s.head):
        s = s if s.views[me].claim == state else with_view(s, me, claim=state)
        if vouched(s, state, me) or alone(s, report):
            heads.append(state)
    if not heads:
        return s, ()
    s = raise_head(s, max(heads, key=lambda x: (x.commit_epoch, x.step)))
    assert s.head is not None
    false = {r: v.claim for r, v in enumerate(s.views) if v.claim is not None and not _fits(v.claim, s.head)}
    return doubt(s, false)


def _claims(s: LighthouseState, me: int) -> set[StateId]:
    return {v.claim for r, v in enumerate(s.views) if r != me and v.claim is not None}


def _fits(claim: StateId, head: StateId) -> bool:
    """Return whether a claim can be true beside the head: older, the head itself, or the step after it."""
    if state_id.newer(claim, head):
        return (claim.commit_epoch, claim.step) == (head.commit_epoch, head.step + 1)
    return state_id.newer(head, claim) or state_id.same(head, claim)


def doubt(s: LighthouseState, claims: Mapping[int, StateId]) -> Step:
    """Doubt the ``claims``, by replica; return an event for each that was not doubted before."""
    notes: list[Effect] = []
    for r, state in claims.items():
        if s.views[r].doubted != state:
            why = f"only replica {r} reports {state}, and the others do not confirm it: it is not believed"
            notes.append(Note("ReportDoubted", why, {"replica": r, "incarnation": s.views[r].incarnation}))
        s = with_view(s, r, claim=None, doubted=state)
    return s, tuple(notes)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the reports of a round are worth."""

    believed: dict[int, Report]  # by replica; without the parts that others contradict
    doubted: dict[int, StateId]  # the states of the replicas that are not believed
    open: str = ""  # what cannot be decided before more members ask or have exited; "": nothing


@dataclass(frozen=True, slots=True)
class Peers:
    """Who could confirm what one replica reports: the other members of the ring that it is, or was, in."""

    left: tuple[Report, ...]  # what those report that have left the ring: they vote in it no more
    intact: tuple[int, ...]  # these have asked, but have not left it
    silent: tuple[int, ...]  # these may live and do not ask

    @staticmethod
    def of(s: LighthouseState, report: Report, reports: Mapping[int, Report], epoch: int) -> Peers:
        """Return it for what the sender of ``report`` says about ``epoch``, from the ``reports`` of all that ask.

        Without a grant these are all that say that they are in that epoch, or in the reporter's.
        """
        silent: tuple[int, ...] = ()
        if s.grant is None:
            here = {
                r: o for r, o in reports.items() if r != report.replica and o.epoch in {report.epoch, epoch} - {0}
            }
        else:
            members = others(s, report.replica, epoch)
            here = {r: o for r, o in reports.items() if members.get(r) == o.incarnation}
            silent = tuple(r for r in members if r not in here)
            epoch = min(epoch, s.grant.epoch)
        left = {r: o for r, o in here.items() if _has_left(s, o, epoch)}
        return Peers(tuple(left.values()), tuple(r for r in here if r not in left), silent)


def _has_left(s: LighthouseState, report: Report, epoch: int) -> bool:
    """Return whether a replica votes no more in the ring of ``epoch``, or in its own if that is older."""
    epoch = min(epoch, report.epoch) if s.grant is None else epoch
    return report.after >= epoch or report.epoch > epoch or report.state.step >= s.policy.steps


def judge(s: LighthouseState, reports: Mapping[int, Report], evicted: Collection[int] = frozenset()) -> Judgement:
    """Judge the reports of all that ask in a round.

    A member that has left the ring votes in it no more, so it knows all that this ring can have committed. What
    it does not name is contradicted. The others may confirm it later.

    Args:
        s: What the lighthouse knows.
        reports: By replica, without overruled records.
        evicted: Replicas that were told to end because they were silent for too long. If no supervisor can be
            reached, their end is never known, so nobody waits for their word.

    Returns:
        Who is believed, who is not, and whom the round waits for.
    """

    def silent(ring: Peers) -> tuple[int, ...]:
        return tuple(r for r in ring.silent if r not in evicted)

    doubted = {r: o.state for r, o in reports.items() if _another_head(s, o) or _contradicted(s, o, reports)}
    believed, waits = dict[int, Report](), list[str]()
    for r, report in reports.items():
        if r in doubted:
            continue
        waits_for: tuple[int, ...] = ()
        if _unconfirmed(s, report.state, r, reports):
            ring = Peers.of(s, report, reports, report.state.commit_epoch)
            sure = follows_head(s, report) and not _denials(s, report.state, ring)
            waits_for += ring.intact + (() if sure else silent(ring))
            waits_for += (r,) if ring.left and not _has_left(s, report, report.epoch) else ()
            waits_for += (r,) if _uncertain(s, report) else ()
        prepared = report.prepared
        if prepared is not None and _unconfirmed(s, prepared.state_id, r, reports):
            ring = Peers.of(s, report, reports, prepared.epoch)
            waits_for += ring.intact
            if any(o.replica not in doubted for o in ring.left):
                report = replace(report, prepared=None)
            elif not _next(s, prepared):
                waits_for += silent(ring)
        if report.doubt is not None and _unconfirmed(s, report.doubt, r, reports):
            ring = Peers.of(s, report, reports, report.doubt.commit_epoch)
            if any(o.replica not in doubted for o in ring.left):
                report = replace(report, doubt=None)
        if report.diverged:
            ring = Peers.of(s, report, reports, report.epoch)
            waits_for += ring.intact + silent(ring)
        believed[r] = report
        if waits_for:
            waits.append(f"only replica {r} reports {report.state}; replica {waits_for[0]} may confirm it")
    return Judgement(believed, doubted, waits[0] if waits else "")


def _unconfirmed(s: LighthouseState, state: StateId, replica: int, reports: Mapping[int, Report]) -> bool:
    """Return whether ``state`` is above the head and no other replica names it or has claimed it."""
    rest = (report for r, report in reports.items() if r != replica)
    return above(state, s.head) and state not in _claims(s, replica) and all(state not in named(o) for o in rest)


def _uncertain(s: LighthouseState, report: Report) -> bool:
    """Return whether a member of the grant does not show the record of its state."""
    return _member(s, report) and not certified(report)


def _contradicted(s: LighthouseState, report: Report, reports: Mapping[int, Report]) -> bool:
    """Return whether a member that has left the same ring does not confirm the reported state.

    If its record builds on the head, two members have to say that they did not vote for it: one that was behind
    has relayed that step, and does not know of it. If the reporter has the record of its state, the others must
    not all say something else that nobody confirms.
    """
    state = report.state
    if not (_unconfirmed(s, state, report.replica, reports) and _has_left(s, report, report.epoch)):
        return False
    ring, key = Peers.of(s, report, reports, state.commit_epoch), (state.commit_epoch, state.step)
    if follows_head(s, report):
        return _denials(s, state, ring) > 1
    if ring.intact or not ring.left:
        return not ring.intact and not ring.silent and _uncertain(s, report)
    doubtful = [
        o
        for o in ring.left
        if (above(o.state, s.head) and not certified(o)) or key in ((x.commit_epoch, x.step) for x in named(o))
    ]
    return not (certified(report) and len(doubtful) == len(ring.left))


def _denials(s: LighthouseState, state: StateId, ring: Peers) -> int:
    """Return how many members have left the ring and would name ``state``, which nobody else does, if it was true.

    A member that was granted as one that holds the base keeps what it votes for, and one that leaves before a
    vote says so. A later grant was made with a member that would have named the state, too.
    """
    members = s.grant.members if s.grant is not None else ()
    later = s.grant is not None and s.grant.epoch > state.commit_epoch
    voters = {m.replica for m in members if m.holds_base or later}
    return sum(o.replica in voters or (o.void is not None and cannot_commit(state, (o.void,))) for o in ring.left)


def _another_head(s: LighthouseState, report: Report) -> bool:
    """Return whether a report names the head's epoch and step, but another lineage."""
    state, head = report.state, s.head
    at_head = head is not None and (state.commit_epoch, state.step) == (head.commit_epoch, head.step)
    return at_head and state != head
