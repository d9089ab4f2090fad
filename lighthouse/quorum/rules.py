"""Quorum: who may go on, from which state. Pure functions of what the lighthouse knows.

The base of a new membership is the highest state that a reporter holds or is prepared for. It may be granted
only if nobody who is absent and alive could know better (docs/protocol.md has the counter-examples behind
each rule).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import AttemptId, CommitRecord, void
from ft_hsdp.core.grant import Grant, Member, Report, Role
from ft_hsdp.core.state_id import StateId

EPOCHS = 32  # that may be remembered before those that are alike are merged

Incarnation = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Epoch:
    """A membership that was granted: (replica, incarnation) of each member, and what it builds on.

    ``base`` is None where a store of an older format does not say.
    """

    number: int
    members: tuple[Incarnation, ...]
    base: StateId | None = None


@dataclass(frozen=True, slots=True)
class AdmittedIncarnation:
    """An incarnation that was admitted; of two of one replica, the one with the larger number came later."""

    replica: int
    incarnation: str
    number: int


@dataclass(frozen=True, slots=True)
class Lease:
    """One supervisor alone may start a replica; of two leases the one with the larger number was given later."""

    replica: int
    owner: str
    number: int


@dataclass(frozen=True, slots=True)
class Base:
    """The state to build on, and the record that led there if only prepared members hold it."""

    state: StateId
    record: CommitRecord | None
    voids: tuple[AttemptId, ...]


def highest(reports: Iterable[Report]) -> Base:
    """The highest committed or prepared state among ``reports``.

    A prepared record does not count if its attempt is known never to commit, or if reporters hold different
    records of one attempt.
    """
    reports = tuple(reports)
    voids = fences(r.void for r in reports if r.void)
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


def fences(known: Iterable[AttemptId]) -> tuple[AttemptId, ...]:
    """Each of ``known`` once, in order."""
    return tuple(sorted(set(known), key=lambda f: (f.epoch, f.step, f.attempt)))


def never(state: StateId, voids: Iterable[AttemptId]) -> bool:
    """Whether ``state`` can never be committed: somebody left an attempt of its step without a yes.

    Attempts up to that one are void, and a later one in its epoch would have needed its vote.
    """
    return any((v.epoch, v.step) == (state.commit_epoch, state.step) for v in voids)


def ahead(report: Report, state: StateId) -> bool:
    """Whether a reporter holds, is prepared for or has voted for something above ``state``."""
    prepared = report.prepared
    if report.doubt is not None and state_id.newer(report.doubt, state):
        return True
    return state_id.newer(report.state, state) or (
        prepared is not None and state_id.newer(prepared.state_id, state)
    )


def follows(head: StateId, base: StateId, epochs: Iterable[Epoch]) -> bool:
    """Whether ``head`` is known to be the step right after ``base``, by lineage.

    An epoch has one history, so two of its states follow each other by their steps; the first state of an epoch
    follows what the epoch was granted on. The same number of steps in another history is not enough.
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
    """An epoch of which nobody is present although some member may live; None if all are covered.

    Its members may have committed something that nobody present knows of. An epoch whose members have all
    exited does not count.
    """
    for epoch in epochs:
        members = frozenset(epoch.members)
        if not members <= exited and not members & present:
            return epoch
    return None


def merged(epochs: Iterable[Epoch], exited: frozenset[Incarnation]) -> tuple[Epoch, ...]:
    """``epochs``, of those that ask the same of whoever is present only the newest, if there are many.

    All that counts of an epoch is which of its members may live, and whose other members have exited; exits only
    add up, so two that are alike in that stay alike. Without commits epochs would pile up for ever.
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
    """Contribute if the reporter holds the base, or exactly the record that leads to it."""
    leads = report.prepared is not None and state_id.same(report.prepared.state_id, base.state)
    return "contribute" if leads or state_id.same(report.state, base.state) else "behind"


def roles(reports: Mapping[int, Report], base: Base) -> dict[int, Role]:
    """The role of each reporter."""
    return {r: role(report, base) for r, report in sorted(reports.items())}


def describe(members: Iterable[Member], base: StateId, why: str) -> str:
    """A line for humans: who does what, and why the membership changed."""
    ordered = sorted(members, key=lambda m: m.replica)
    able = [str(m.replica) for m in ordered if m.role == "contribute"]
    behind = [str(m.replica) for m in ordered if m.role == "behind"]
    text = f"{why}; replicas {','.join(able) or 'none'} contribute on {base}"
    return text + (f"; {','.join(behind)} behind" if behind else "")


def grant(term: int, epoch: int, base: Base, members: tuple[Member, ...], total: int, why: str) -> Grant:
    """The grant of ``epoch`` for ``members`` in ring order."""
    ids = [m.replica for m in members]
    assert len(set(ids)) == len(ids), f"a grant names each replica once, not {ids}"
    return Grant(term, epoch, base.state, members, total, describe(members, base.state, why), base.voids)
