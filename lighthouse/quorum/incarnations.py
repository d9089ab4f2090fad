"""Lives: which incarnation of a replica counts, and which supervisor may start the next one. Pure.

The lighthouse numbers an incarnation when it first hears of it; a grant tells a member its number, and its reports
carry it. So the order of two lives is known for ever, also after the lighthouse has forgotten both, was restarted,
or got an older store back. Only a life that was admitted later takes the place of another one.

A supervisor has a lease of each replica that it starts, and renews it with its reports. So of two supervisors of
one replica one starts nothing, and they do not fence each other's lives for ever.

Exits: which ended incarnations are remembered, so that the table does not grow with the job. Pure.

An incarnation is called REPLICA-RUN-RESTARTS, and the next one of a run is started only when all of the one before
is gone. So the newest exit of a run speaks for all lives before it, and those are needed by name only while they
stand in an epoch that is remembered. The newest exits that a supervisor goes on naming are kept, so that they are
no news; those of a run that it names no more are of use to nobody: whoever belonged to it was fenced by its
replica's new run, and could not hold up, or bring back, anything (a record that is older than the grant is
overruled).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ft_hsdp.core.grant import Report
from ft_hsdp.core.incarnation import IncarnationId
from lighthouse.quorum.rules import AdmittedIncarnation, Incarnation, Lease
from lighthouse.quorum.state import Effect, LighthouseState, Note, ProcessesReported, Step, with_view

REMEMBERED = 8  # lives of one replica, of different runs; others are known by the number that they were told


def run_of(incarnation: str) -> tuple[str, int]:
    """The run that an incarnation belongs to, and how often its replica had been restarted in it.

    Runs of different replicas may have one name. A text that is no name is a run of its own.
    """
    name = IncarnationId.parse(incarnation)
    return (incarnation, 0) if name is None else (name.run_id, name.restarts)


def outlived(who: Incarnation, others: Iterable[Incarnation]) -> bool:
    """Whether one of ``others`` is a later life of the same run: then ``who`` has exited."""
    run, restarts = run_of(who[1])
    lives = (run_of(incarnation) for replica, incarnation in others if replica == who[0])
    return any(theirs == run and number > restarts for theirs, number in lives)


def learn(s: LighthouseState, event: ProcessesReported) -> tuple[LighthouseState, list[Incarnation]]:
    """``s`` with the exits that a supervisor names, and without those that matter no more; which ones are news."""
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
    """The life of a replica that was admitted last."""
    return max((life for life in s.lives if life.replica == replica), key=lambda life: life.number, default=None)


def admit(s: LighthouseState, who: Incarnation, now: float, report: Report | None = None) -> LighthouseState | str:
    """``s`` with ``who`` as the newest life of its replica; or why it cannot be that.

    Args:
        s: What the lighthouse knows.
        who: The incarnation that asks, or of which a supervisor says that it runs.
        now: Seconds, on the lighthouse's clock.
        report: What it says of itself, if it is the one that asks.

    Returns:
        The state, in which it has a number; or one line for the incarnation, which must end.
    """
    replica, incarnation = who
    known = newest(s, replica)
    mine = number_of(s, who)
    number = max(mine, report.number if report is not None else 0)
    fenced = f"fenced: replica {replica} has a newer incarnation"
    if known is not None and known.incarnation != incarnation:
        if outlived(who, ((life.replica, life.incarnation) for life in s.lives)):
            return f"{fenced}, of the same supervisor: {known.incarnation}"
        if number and number <= known.number:
            return (
                f"{fenced}: {incarnation} was admitted as number {number}, {known.incarnation} as {known.number}"
            )
        if not number and report is not None and (report.epoch or report.max_term):
            return f"{fenced}: {incarnation} was granted before {known.incarnation} was admitted"
    owner = _leased_to(s, replica, now)
    if not number and owner and run_of(incarnation)[0] != owner:
        return f"supervisor {owner} has the lease of replica {replica}, and did not start {incarnation}"
    if not number:
        number = max(s.admissions, known.number if known is not None else 0) + 1
    if number == mine:
        return s
    return replace(s, lives=_with(s.lives, AdmittedIncarnation(replica, incarnation, number)))


def number_of(s: LighthouseState, who: Incarnation) -> int:
    """The number that an incarnation was admitted with; 0: it was not, or that is forgotten."""
    return next((life.number for life in s.lives if (life.replica, life.incarnation) == who), 0)


def _with(lives: tuple[AdmittedIncarnation, ...], new: AdmittedIncarnation) -> tuple[AdmittedIncarnation, ...]:
    """``lives`` and a ``new`` one: of one run only the newest, of one replica the newest `REMEMBERED`."""
    run = run_of(new.incarnation)[0]
    others = [life for life in lives if life.replica != new.replica]
    same = [life for life in lives if life.replica == new.replica and run_of(life.incarnation)[0] != run]
    kept = sorted([*same, new], key=lambda life: life.number)[-REMEMBERED:]
    return tuple(sorted([*others, *kept], key=lambda life: (life.replica, life.number)))


def lease_of(s: LighthouseState, replica: int) -> Lease | None:
    """The lease of a replica, even if its supervisor has not reported for long."""
    return next((lease for lease in s.leases if lease.replica == replica), None)


def _leased_to(s: LighthouseState, replica: int, now: float) -> str:
    """The supervisor that has the lease of a replica and reports; "" if there is none.

    The incarnations that it starts have its name as their run's. One of another supervisor, of which the
    lighthouse has never heard, was started under a lease that has ended.
    """
    known, renewed = lease_of(s, replica), s.views[replica].renewed
    reports = renewed is not None and now < renewed + s.policy.supervisor_lease_s
    return known.owner if known is not None and reports else ""


def entitled(s: LighthouseState, owner: str, replica: int) -> bool:
    """Whether a supervisor's word on what runs of a replica counts; a rank speaks for itself as no owner."""
    lease = lease_of(s, replica)
    return not owner or lease is None or lease.owner == owner


def lease(s: LighthouseState, event: ProcessesReported) -> Step:
    """Renew the leases that a supervisor has, give it those that are free, end those that it claims no more.

    A lease is free when its supervisor has not reported for `Policy.supervisor_lease_s`. One that a store has
    outlived begins anew with the first claim of another supervisor. Who was given a later lease than the one that
    is known has it: the store is an older one.
    """
    if not event.owner:
        return s, ()
    claims, notes = dict(event.claims), list[Effect]()
    kept = tuple(old for old in s.leases if old.owner != event.owner or old.replica in claims)
    s = s if kept == s.leases else replace(s, leases=kept)
    for replica, number in claims.items():
        known, renewed = lease_of(s, replica), s.views[replica].renewed
        if known is not None and known.owner != event.owner and number <= known.number:
            if renewed is None:
                s = with_view(s, replica, renewed=event.now)
            if renewed is None or event.now < renewed + s.policy.supervisor_lease_s:
                continue
        if known is None or known.owner != event.owner:
            later = max(s.admissions, known.number if known is not None else 0) + 1
            new = Lease(replica, event.owner, max(number, later))
            others = (old for old in s.leases if old.replica != replica)
            s = replace(s, leases=tuple(sorted((*others, new), key=lambda one: one.replica)))
            if known is not None:
                why = f"supervisor {event.owner} has taken replica {replica} over from {known.owner}"
                notes.append(Note("SupervisorLeased", why, {"replica": replica}))
        s = with_view(s, replica, renewed=event.now)
    return s, tuple(notes)
