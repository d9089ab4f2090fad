"""Exits: which ended incarnations are remembered, so that the table does not grow with the job. Pure.

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

from lighthouse.quorum import Incarnation
from lighthouse.state import ProcessesReported, State


def run_of(incarnation: str) -> tuple[str, int]:
    """The run that an incarnation belongs to, and how often its replica had been restarted in it."""
    run, _, restarts = incarnation.rpartition("-")
    return (run, int(restarts)) if restarts.isdecimal() else (incarnation, 0)


def outlived(who: Incarnation, others: Iterable[Incarnation]) -> bool:
    """Whether one of ``others`` is a later life of the same run: then ``who`` has exited."""
    run, restarts = run_of(who[1])
    lives = (run_of(incarnation) for replica, incarnation in others if replica == who[0])
    return any(theirs == run and number > restarts for theirs, number in lives)


def learn(s: State, event: ProcessesReported) -> tuple[State, list[Incarnation]]:
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
