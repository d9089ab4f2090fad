"""Edges: connections between two members that both live, but do not come about or do not hold. Pure.

Who blames whom is in the reports. An edge counts as failed if both of its ends are there when the next epoch is
formed; a member that is gone is another matter. After `APART` failures in a row the two ends are put apart in the
ring, where that is possible; after `OUT` the one of the two that more edges blame is left out for a while, each
time twice as long as before. A step that is committed over an edge makes up for its failures.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from ft_hsdp.core.grant import Grant, Member, Report

APART = 2
OUT = 4
LONGEST = 16  # times the first pause of one who is left out

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Barred:
    """A replica that is left out until then (0: it is tried again); the pause, in seconds, was the newest one."""

    replica: int
    until: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class Edges:
    """Failures in a row of each pair of replicas, who is left out for them, and the newest epoch counted."""

    failures: tuple[tuple[Pair, int], ...] = ()
    barred: tuple[Barred, ...] = ()
    counted: int = 0

    @property
    def avoided(self) -> frozenset[Pair]:
        """The pairs that are not to be neighbours."""
        return frozenset(pair for pair, times in self.failures if times >= APART)

    def out(self, now: float = 0.0) -> frozenset[int]:
        """Who is left out at ``now``; at 0: whoever was when time was looked at last."""
        return frozenset(b.replica for b in self.barred if b.until > now)


NO_EDGES = Edges()


@dataclass(frozen=True, slots=True)
class EdgeVerdict:
    """What follows from the failures of an edge: ``excluded`` is left out for ``pause_s``, if it is not None."""

    pair: Pair
    failures: int
    excluded: int | None = None
    pause_s: float = 0.0
    stuck: bool = False

    @property
    def reason(self) -> str:
        """In words."""
        a, b = self.pair
        text = f"the connection between replicas {a} and {b} failed {self.failures} times in a row"
        if self.stuck:
            return f"{text}; too few replicas would be left without one of them"
        if self.excluded is None:
            return f"{text}; they are put apart in the ring"
        return f"{text}; replica {self.excluded} is left out for {self.pause_s:g} s, then it is tried again"

    @property
    def facts(self) -> dict[str, object]:
        """For the journal."""
        known: dict[str, object] = {"replicas": list(self.pair), "failures": self.failures}
        return known if self.excluded is None else {**known, "excluded": self.excluded, "seconds": self.pause_s}


def remembered(edges: Edges) -> Edges:
    """What is known after a restart, with another clock: who is left out is tried at once, then waits longer."""
    return replace(edges, barred=tuple(replace(b, until=0.0) for b in edges.barred))


def neighbours(ring: tuple[int, ...]) -> frozenset[Pair]:
    """The pairs that are next to each other in a ring."""
    around = zip(ring, (*ring[1:], *ring[:1]), strict=True)
    return frozenset((min(a, b), max(a, b)) for a, b in around if a != b)


def proven(edges: Edges, ring: tuple[int, ...]) -> Edges:
    """A step was committed over ``ring``: its edges hold."""
    if not edges.failures and not edges.barred:
        return edges
    hold = neighbours(ring)
    failures = tuple((pair, times) for pair, times in edges.failures if pair not in hold)
    left = {r for pair, _ in failures for r in pair}
    barred = tuple(b for b in edges.barred if b.replica not in ring or b.replica in left)
    return replace(edges, failures=failures, barred=barred)


def blamed(grant: Grant, reports: Mapping[int, Report]) -> frozenset[Pair]:
    """The edges of ``grant`` that failed, as far as both ends are there to say so, or to hear it."""
    there = {
        m.replica
        for m in grant.members
        if m.replica in reports
        and reports[m.replica].incarnation == m.incarnation
        and reports[m.replica].after == grant.epoch
    }
    said = (reports[r].edge for r in there)
    pairs = {(min(edge), max(edge)) for edge in said if edge is not None}
    return frozenset(pair for pair in pairs & neighbours(grant.ring) if set(pair) <= there)


def learn(
    edges: Edges,
    grant: Grant,
    reports: Mapping[int, Report],
    spared: Container[int],
    now: float,
    pause_s: float,
) -> tuple[Edges, tuple[EdgeVerdict, ...]]:
    """The ring of ``grant`` is over: count its failed edges, once.

    Args:
        edges: What is known.
        grant: The membership whose ring broke.
        reports: Those of all that ask, by replica.
        spared: The replicas without each of which enough others hold the state to go on.
        now: Seconds; pauses that are over end.
        pause_s: How long a replica is left out the first time.
    """
    late = tuple(replace(b, until=0.0) if b.until <= now else b for b in edges.barred)
    edges = edges if late == edges.barred else replace(edges, barred=late)
    if edges.counted >= grant.epoch:
        return edges, ()
    failures = dict(edges.failures)
    verdicts: list[EdgeVerdict] = []
    bad = sorted(blamed(grant, reports))
    for pair in bad:
        failures[pair] = failures.get(pair, 0) + 1
    barred = {b.replica: b for b in edges.barred}
    for pair in bad:
        times = failures[pair]
        if times == APART and len(grant.members) >= 4:
            verdicts.append(EdgeVerdict(pair, times))
        if times < OUT or any(r in barred and barred[r].until > now for r in pair):
            continue
        blames = {r: sum(r in other for other in failures) for r in pair}
        able = [r for r in sorted(pair, key=lambda r: (blames[r], r), reverse=True) if r in spared]
        if not able:
            verdicts += [EdgeVerdict(pair, times, stuck=True)] if times == OUT else []
            continue
        known = barred.get(able[0])
        wait_s = pause_s if known is None else min(2 * known.pause_s, LONGEST * pause_s)
        barred[able[0]] = Barred(able[0], now + wait_s, wait_s)
        verdicts.append(EdgeVerdict(pair, times, able[0], wait_s))
        for other in barred:  # whoever was left out only because of this one can connect to the rest
            partners = {r for p, n in failures.items() if n >= OUT and other in p for r in p} - {other}
            if other != able[0] and partners <= {able[0]}:
                barred[other] = replace(barred[other], until=0.0)
    kept = tuple(barred[r] for r in sorted(barred))
    return replace(edges, failures=tuple(sorted(failures.items())), barred=kept, counted=grant.epoch), tuple(
        verdicts
    )


def arrange(members: Iterable[Member], avoided: frozenset[Pair]) -> tuple[Member, ...]:
    """``members`` in ring order: by id, but with as few of the ``avoided`` pairs next to each other as is found.

    Parts of the ring are turned round, as long as that takes such pairs apart.
    """
    ring = sorted(members, key=lambda m: m.replica)
    size = len(ring)

    def bad(a: int, b: int) -> bool:
        x, y = ring[a % size].replica, ring[b % size].replica
        return (min(x, y), max(x, y)) in avoided

    def better(i: int, j: int) -> bool:
        """Whether to turn the part from ``i`` + 1 to ``j`` round."""
        return bad(i, j) + bad(i + 1, j + 1) < bad(i, i + 1) + bad(j, j + 1)

    found = bool(avoided) and size > 3
    while found:
        wrong = [i for i in range(size) if bad(i, i + 1)]
        turns = ((i, j) for w in wrong for i, j in _turns(w, size) if better(i, j))
        i, j = next(turns, (0, 0))
        found = j > i
        if found:
            ring[i + 1 : j + 1] = reversed(ring[i + 1 : j + 1])
    return tuple(ring)


def _turns(wrong: int, size: int) -> Iterable[tuple[int, int]]:
    """The parts of a ring that begin or end at the pair ``wrong``, ``wrong`` + 1."""
    yield from ((wrong, j) for j in range(wrong + 2, size))
    yield from ((i, wrong) for i in range(wrong - 1))
