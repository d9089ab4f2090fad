"""Which incarnation of a replica counts, which exits are remembered, who may start the next one. Pure.

Numbers. The lighthouse numbers an incarnation when it first hears of it. A grant tells the number to the member,
and its reports carry it. So the order of two incarnations of a replica is known for ever, also after the
lighthouse has forgotten both, was restarted, or got an older store back. Only an incarnation that was admitted
later replaces another one.

Exits. An incarnation is called REPLICA-RUN-RESTARTS, and the next one of a run is started only when all processes
of the one before have ended. So the newest exit of a run stands for all incarnations before it; those are needed
by name only while they are members of a remembered epoch. The newest exits that a supervisor keeps naming are
remembered, so that they are no news. Those of a run that it names no more are dropped: its incarnations were
fenced by the replica's new run, and could neither delay nor bring back anything (a record that is older than the
grant is overruled). This bounds the table, which would otherwise grow with the job.

Leases. A supervisor has a lease of each replica that it starts, and renews it with its reports. So of two
supervisors of one replica one starts nothing, and they do not fence each other's incarnations for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ft_hsdp.core.grant import Report
from ft_hsdp.core.incarnation import IncarnationId
from lighthouse.quorum.rules import AdmittedIncarnation, Incarnation, Lease
from lighthouse.quorum.state import Effect, LighthouseState, Note, ProcessesReported, Step, with_view

REMEMBERED = 8  # incarnations of one replica, of different runs; older ones report the number that they were told


def run_of(incarnation: str) -> tuple[str, int]:
    """Return the run that an incarnation belongs to, and how often its replica had been restarted in that run.

    Runs of different replicas may have one name. A text that is no name of an incarnation is a run of its own.

    Args:
        incarnation: Its name, REPLICA-RUN-RESTARTS.
    """
    name = IncarnationId.parse(incarnation)
    return (incarnation, 0) if name is None else (name.run_id, name.restarts)


def outlived(who: Incarnation, others: Iterable[Incarnation]) -> bool:
    """Return whether one of ``others`` is a later incarnation of the same run: then ``who`` has exited.

    Args:
        who: The incarnation in question.
        others: Incarnations that are known, of any replica.
    """
    run, restarts = run_of(who[1])
    lives = (run_of(incarnation) for replica, incarnation in others if replica == who[0])
    return any(theirs == run and number > restarts for theirs, number in lives)


def record_exits(s: LighthouseState, event: ProcessesReported) -> tuple[LighthouseState, list[Incarnation]]:
    """Remember the exits that a supervisor names, and drop those that no longer matter.

    Args:
        s: What the lighthouse knows.
        event: The supervisor's report.

    Returns:
        The state, and the exits that the lighthouse did not know of, sorted.
    """
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


def admit(s: LighthouseState, who: Incarnation, now: float, report: Report | None = None) -> LighthouseState | str:
    """Make ``who`` the newest incarnation of its replica, or say why it cannot be that.

    Args:
        s: What the lighthouse knows.
        who: The incarnation that asks, or that a supervisor says is running.
        now: Seconds on the lighthouse's clock.
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
    """Return the number that an incarnation was admitted with; 0 if it was not admitted or that is forgotten."""
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


def lease_of(s: LighthouseState, replica: int) -> Lease | None:
    """Return the lease of a replica, even if its supervisor has not reported for long; None if there is none."""
    return next((lease for lease in s.leases if lease.replica == replica), None)


def _leased_to(s: LighthouseState, replica: int, now: float) -> str:
    """Return the supervisor that has the lease of a replica and reports; "" if there is none.

    The incarnations that it starts have its name as their run's. An incarnation of another supervisor, of which
    the lighthouse has never heard, was started under a lease that has ended.
    """
    known, renewed = lease_of(s, replica), s.views[replica].renewed
    reports = renewed is not None and now < renewed + s.policy.supervisor_lease_s
    return known.owner if known is not None and reports else ""


def entitled(s: LighthouseState, owner: str, replica: int) -> bool:
    """Return whether a supervisor's word on what runs of a replica counts.

    Args:
        s: What the lighthouse knows.
        owner: The supervisor's name; "" for a rank that reports of itself, whose word counts always.
        replica: The replica.
    """
    lease = lease_of(s, replica)
    return not owner or lease is None or lease.owner == owner


def renew_leases(s: LighthouseState, event: ProcessesReported) -> Step:
    """Renew the leases that a supervisor has, give it those that are free, end those that it claims no more.

    A lease is free when its supervisor has not reported for `Policy.supervisor_lease_s`. After a restart of the
    lighthouse, the wait for a lease's supervisor begins with the first claim of another one. A supervisor that
    claims a lease with a larger number than the known one has it: the store is an older copy.

    Args:
        s: What the lighthouse knows.
        event: The supervisor's report.

    Returns:
        The state, and an event for the journal for each replica that changed its supervisor.
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
