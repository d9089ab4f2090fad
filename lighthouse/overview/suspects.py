"""Who keeps the job waiting, found while it runs, before a timeout fires. Pure.

A job is quiet once no step was committed for `QUIET_S`, or for `QUIET_STEPS` usual steps if that is longer. What
its ranks then tell of their collectives is analysed about once a second (`ft_hsdp.analysis.culprits`). A finding
is told when two analyses in a row agree, because what the ranks tell is up to a second old. It is over when a
step is committed. While a training loop pauses on purpose, all wait for it, and no rank is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ft_hsdp.analysis.culprits import SETTLED_S, SILENT_S, Finding, find
from ft_hsdp.analysis.diagnosis import KnownRank, heard

QUIET_S = 2.0
QUIET_STEPS = 3.0
TOO_LONG = 2.0  # x the quiet time: then it does not matter that some rank gets on
AGAIN_S = 0.9  # between two analyses


class SuspectVerdict(NamedTuple):
    """What changed: a rank, or several of which one is the culprit, keeps the job waiting, or does no more."""

    replica: int | None  # None: they are of several
    rank: int | None
    over: bool
    kind: str
    suspects: list[str]  # "replica/rank" of each
    witnesses: int  # as in `Finding`
    epoch: int  # as in `Finding`
    reason: str


def has_stopped(ranks: Iterable[KnownRank], quiet_s: float, typical_s: float) -> bool:
    """Return whether a job without a step for ``quiet_s`` seconds has stopped; a usual step takes ``typical_s``.

    As long as a rank gets on, what the others have told is of another moment. But a rank may get on forever.
    """
    enough_s = max(QUIET_S, QUIET_STEPS * typical_s)
    if quiet_s <= enough_s:
        return False
    if quiet_s > TOO_LONG * enough_s:
        return True
    return all(r.age_s > SILENT_S or (r.still_s and r.still_s + r.age_s >= SETTLED_S) for r in ranks)


class Suspects:
    """The findings on one job. Times are in monotonic seconds."""

    def __init__(self) -> None:
        self._told: set[Finding] = set()
        self._before: set[Finding] = set()  # what the last analysis found
        self._looked = 0.0

    def judge(
        self, known: Callable[[], Iterable[KnownRank]], quiet_s: float, typical_s: float, now: float
    ) -> list[SuspectVerdict]:
        """Return what is found or over since the last call.

        Args:
            known: Returns all ranks of the job.
            quiet_s: Seconds since the newest step was committed.
        """
        if quiet_s <= QUIET_S:
            over, self._told, self._before = self._told, set(), set()
            return [verdict(each, over=True) for each in over]
        if now < self._looked + AGAIN_S:
            return []
        self._looked = now
        ranks = list(known())
        found = find(heard(ranks)).findings if has_stopped(ranks, quiet_s, typical_s) else ()
        agreed = {each for each in found if each in self._before}
        self._before = set(found)
        new = [each for each in found if each in agreed - self._told]
        self._told |= agreed
        return [verdict(each, over=False) for each in new]


def verdict(finding: Finding, *, over: bool) -> SuspectVerdict:
    """Return a finding as an event has it."""
    replicas = {each.replica for each in finding.ranks}
    replica = next(iter(replicas)) if len(replicas) == 1 else None
    rank = finding.ranks[0].rank if len(finding.ranks) == 1 else None
    reason = "a step was committed" if over else finding.why
    suspects = [str(each) for each in finding.ranks]
    return SuspectVerdict(replica, rank, over, finding.kind, suspects, finding.witnesses, finding.epoch, reason)
