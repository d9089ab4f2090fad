"""The rules of the quorum on reports alone: which state to build on, who contributes, whose absence forbids it.

The base of a new membership is the highest state that a reporter holds or is prepared for. It may be granted only
if no absent incarnation that may live could know a higher one (docs/protocol.md has the counter-example behind
each rule). FT-HSDP §4.3 calls the replicas with the highest step number healthy; here states are compared by
(commit_epoch, step) and told apart by lineage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import AttemptId, CommitRecord, void
from ft_hsdp.core.grant import Grant, Member, Report, Role
from ft_hsdp.core.state_id import StateId

EPOCHS = 32  # more remembered epochs than these are merged (`merged`)

Incarnation = tuple[int, str]  # (replica, name of the incarnation)


@dataclass(frozen=True, slots=True)
class Epoch:
    """A membership that was granted."""

    number: int
    members: tuple[Incarnation, ...]
    base: StateId | None = None  # the state that it builds on; None: a store of an older format does not say


@dataclass(frozen=True, slots=True)
class AdmittedIncarnation:
    """An incarnation that the lighthouse admitted, and the number that it gave to it."""

    replica: int
    incarnation: str
    number: int  # of two incarnations of one replica, the one with the larger number came later


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one supervisor to start a replica."""

    replica: int
    owner: str  # name of the supervisor
    number: int  # of two leases of one replica, the one with the larger number was given later


@dataclass(frozen=True, slots=True)
class Base:
    """The state that a membership builds on."""

    state: StateId
    record: CommitRecord | None  # the record that leads to it, if only prepared members hold it
    voids: tuple[AttemptId, ...]  # attempts that can never commit


def highest(reports: Iterable[Report]) -> Base:
    """Return the highest committed or prepared state among ``reports``.

    A prepared record does not count if its attempt can never commit, or if reporters hold different records of one
    attempt. Of two records of one step and epoch, the one of the later attempt counts.

    Args:
        reports: What the replicas reported, at least one.

    Returns:
        The state, the prepared record that leads to it (None: a reporter holds the state itself), and the attempts
        that the reporters will never vote for.

    Raises:
        ValueError: there are no reports.
    """
    reports = tuple(reports)
    voids = distinct_attempts(r.void for r in reports if r.void)
    best = max((r.state for r in reports), key=lambda s: (s.commit_epoch, s.step))
    record: CommitRecord | None = None
    prepared = [r.prepared for r in reports if r.prepared is not None and not void(r.prepared.fence, voids)]
    for candidate in sorted(prepared, key=lambda p: (p.epoch, p.step, p.attempt)):
        rivals = [p for p in prepared if p.fence == candidate.fence]
        if any(p.digest != candidate.digest for p in rivals):
            continue
        if state_id.newer(candidate.state_id, best) or (
            record is not None and candidate.fence.attempt > record.fence.attempt
        ):
            best, record = candidate.state_id, candidate
    return Base(best, record, voids)


def distinct_attempts(attempts: Iterable[AttemptId]) -> tuple[AttemptId, ...]:
    """Return each of the ``attempts`` once, sorted by (epoch, step, attempt)."""
    return tuple(sorted(set(attempts), key=lambda a: (a.epoch, a.step, a.attempt)))


def cannot_commit(state: StateId, voids: Iterable[AttemptId]) -> bool:
    """Return whether ``state`` can never be committed: a member left an attempt of its step without a yes.

    Attempts up to that one are void, and a later attempt in the same epoch would have needed that member's vote.

    Args:
        state: A state that a reporter believes to be committed.
        voids: The attempts that members will never vote for.
    """
    return any((v.epoch, v.step) == (state.commit_epoch, state.step) for v in voids)


def ahead(report: Report, state: StateId) -> bool:
    """Return whether a reporter holds, is prepared for or has voted for a state above ``state``.

    Args:
        report: What a replica reported.
        state: The state that a membership would build on.
    """
    prepared = report.prepared
    if report.doubt is not None and state_id.newer(report.doubt, state):
        return True
    return state_id.newer(report.state, state) or (
        prepared is not None and state_id.newer(prepared.state_id, state)
    )


def follows(head: StateId, base: StateId, epochs: Iterable[Epoch]) -> bool:
    """Return whether ``head`` is known to be the step right after ``base``, by lineage.

    An epoch has one history, so of two of its states the step numbers decide. The first state of an epoch follows
    the base that the epoch was granted on. The same number of steps in another history is not enough.

    Args:
        head: The later state.
        base: The state that may come right before it.
        epochs: The epochs that are remembered, with the bases that they were granted on.
    """
    if head.step != base.step + 1:
        return False
    if head.commit_epoch == base.commit_epoch:
        return True
    return any(
        e.number == head.commit_epoch and e.base is not None and state_id.same(e.base, base) for e in epochs
    )


def uncovered(
    epochs: Iterable[Epoch], exited: frozenset[Incarnation], present: frozenset[Incarnation]
) -> Epoch | None:
    """Return an epoch of which no member is present although some may live; None if all epochs are covered.

    Members of such an epoch may have committed a step that no present replica knows of. An epoch whose members
    have all exited does not count.

    Args:
        epochs: The epochs that are remembered.
        exited: The incarnations that are known to have exited.
        present: The incarnations that ask now.
    """
    for epoch in epochs:
        members = frozenset(epoch.members)
        if not members <= exited and not members & present:
            return epoch
    return None


def merged(epochs: Iterable[Epoch], exited: frozenset[Incarnation]) -> tuple[Epoch, ...]:
    """Return ``epochs`` without those that a newer one stands for, if there are more than `EPOCHS`.

    Two epochs are alike if the same members may live and members of the same replicas have exited; the newest of
    them stays. Nothing else counts when a round looks for absent members, and exits only add up, so epochs that
    are alike stay alike. Without this, epochs would pile up for ever while no step commits.

    Args:
        epochs: The epochs that are remembered, oldest first.
        exited: The incarnations that are known to have exited.
    """
    epochs = tuple(epochs)
    if len(epochs) <= EPOCHS:
        return epochs
    newest: dict[tuple[frozenset[Incarnation], frozenset[int]], Epoch] = {}
    for epoch in epochs:
        members = frozenset(epoch.members)
        alike = members - exited, frozenset(r for r, _ in members & exited)
        newest.pop(alike, None)
        newest[alike] = epoch
    return tuple(newest.values())


def role(report: Report, base: Base) -> Role:
    """Return "contribute" if the reporter holds the base or exactly the record that leads to it, else "behind".

    Args:
        report: What a replica reported.
        base: The state to build on.
    """
    leads = report.prepared is not None and state_id.same(report.prepared.state_id, base.state)
    return "contribute" if leads or state_id.same(report.state, base.state) else "behind"


def describe(members: Iterable[Member], base: StateId, why: str) -> str:
    """Return a line for humans: who contributes on what, who is behind, and why the membership changed.

    Args:
        members: In any order.
        base: The state that they build on.
        why: Why the membership changed.
    """
    ordered = sorted(members, key=lambda m: m.replica)
    able = [str(m.replica) for m in ordered if m.role == "contribute"]
    behind = [str(m.replica) for m in ordered if m.role == "behind"]
    text = f"{why}; replicas {','.join(able) or 'none'} contribute on {base}"
    return text + (f"; {','.join(behind)} behind" if behind else "")


def grant(term: int, epoch: int, base: Base, members: tuple[Member, ...], total: int, why: str) -> Grant:
    """Return the grant of ``epoch`` for ``members``, not yet signed.

    Args:
        term: The lighthouse's term.
        epoch: A number that was never granted before.
        base: The state to build on.
        members: The members in ring order; each replica at most once.
        total: How many replicas the contributors are a share of.
        why: Why the membership changed, for `Grant.reason`.

    Raises:
        AssertionError: a replica is named twice.
    """
    ids = [m.replica for m in members]
    assert len(set(ids)) == len(ids), f"a grant names each replica once, not {ids}"
    return Grant(term, epoch, base.state, members, total, describe(members, base.state, why), base.voids)
