"""A diagnosis as a document: what all ranks have told, who keeps the job waiting, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ft_hsdp.analysis.culprits import SILENT_S, BlockedCollective, Diagnosis, Finding, find, find_slow
from ft_hsdp.core.traces import Heard, RankId, RankTrace

EVEN_S = 20.0  # after a stop: what ranks tell of their waits is of up to so many seconds before
SHOWN_WAITS = 100  # collectives in one document, those with the most ranks
SHOWN_RANKS = 32  # of one collective, and of one finding
SHOWN_FINDINGS = 100
MAX_RANKS = 4096  # in one document
WORDS = ("culprit", "silent", "absent", "waits", "")  # on a rank, worst first

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KnownRank:
    """What a lighthouse knows of one rank."""

    replica: int
    rank: int
    host: str
    pid: int
    age_s: float  # since it was heard
    trace: RankTrace | None
    still_s: float = 0.0  # as in `Heard`


@dataclass(frozen=True, slots=True)
class Dump:
    """All that a diagnosis is made from."""

    job: str
    t: float  # when it was made, in Unix seconds
    stopped: bool  # no step was committed for much longer than one takes
    quiet_s: float | None  # since the newest step; None: this lighthouse has seen none
    typical_s: float  # of a usual step
    even_s: float | None  # since steps come evenly; None: this lighthouse has seen no other
    ranks: tuple[KnownRank, ...]
    pauses: dict[str, str] = field(default_factory=dict)  # by replica: what its loop does instead of training
    failures: tuple[Json, ...] = ()  # of the last minute, as in the overview
    format: Literal["ft_hsdp traces 1"] = "ft_hsdp traces 1"


def heard(ranks: Iterable[KnownRank]) -> dict[RankId, Heard]:
    """Return what the analysis takes."""
    return {RankId(r.replica, r.rank): Heard(r.trace, r.age_s, r.still_s) for r in ranks}


def describe(dump: Dump) -> Json:
    """Return the document of `diagnose --json`, and of GET /v1/diagnosis.

    Args:
        dump: What is known. While a training loop pauses, nobody is at fault.
    """
    told = heard(dump.ranks)
    if dump.pauses or dump.quiet_s is None:
        found = Diagnosis((), ())
    else:
        even = dump.even_s is None or dump.even_s >= EVEN_S
        found = find(told) if dump.stopped else find_slow(told) if even else Diagnosis((), ())
    known = {RankId(r.replica, r.rank): r for r in dump.ranks}
    waits = sorted(found.waits, key=lambda wait: (-len(wait.waiting), wait.group))[:SHOWN_WAITS]
    return {
        "job": dump.job,
        "t": dump.t,
        "stopped": dump.stopped,
        "quiet_s": dump.quiet_s,
        "typical_s": dump.typical_s,
        "pauses": dump.pauses,
        "failures": list(dump.failures),
        "findings": [_finding(each, known) for each in sorted(found.findings, key=_order)[:SHOWN_FINDINGS]],
        "waits": [_wait(each) for each in waits],
        "ranks": _ranks(dump.ranks, found),
    }


def _ranks(ranks: Iterable[KnownRank], found: Diagnosis) -> list[list[Any]]:
    """Return [replica, rank, still_s, age_s, word] of at most `MAX_RANKS` ranks, the worst first."""
    culprits = {rank for finding in found.findings for rank in finding.ranks}
    waiting = {rank for wait in found.waits for rank in wait.waiting}
    absent = {rank for wait in found.waits for rank in wait.absent} - waiting  # who waits itself cannot come
    rows: list[list[Any]] = []
    for known in ranks:
        who = RankId(known.replica, known.rank)
        words = (who in culprits, known.age_s > SILENT_S, who in absent, who in waiting)
        word = next((word for word, is_so in zip(WORDS, words, strict=False) if is_so), "")
        rows.append([*who, round(known.still_s, 1), round(known.age_s, 1), word])
    return sorted(rows, key=lambda row: (WORDS.index(row[4]), -(row[2] or 0.0), row[:2]))[:MAX_RANKS]


def _order(finding: Finding) -> tuple[int, int]:
    """Return what sorts findings: those that say most come first."""
    return len(finding.ranks), -finding.waiting


def _finding(finding: Finding, known: Mapping[RankId, KnownRank]) -> Json:
    return {
        "kind": finding.kind,
        "why": finding.why,
        "waiting": finding.waiting,
        "suspects": [_suspect(rank, known[rank]) for rank in finding.ranks[:SHOWN_RANKS] if rank in known],
    }


def _suspect(who: RankId, known: KnownRank) -> Json:
    trace = known.trace
    return {
        "name": str(who),
        "replica": who.replica,
        "rank": who.rank,
        "host": known.host,
        "pid": known.pid,
        "age_s": known.age_s,
        "still_s": known.still_s,
        "doing": "" if trace is None else trace.doing,
        "stack": [] if trace is None else list(trace.stack),
    }


def _wait(wait: BlockedCollective) -> Json:
    return {
        "group": wait.group,
        "number": wait.number,
        "op": wait.op,
        "waiting": [str(each) for each in wait.waiting[:SHOWN_RANKS]],
        "waiting_in_all": len(wait.waiting),
        "absent": [str(each) for each in wait.absent[:SHOWN_RANKS]],
        "absent_in_all": len(wait.absent),
    }
