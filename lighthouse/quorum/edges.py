"""Edges: connections between two members that both live, but that fail to form or to last. Pure.

The reports say who blames whom. An edge counts as failed if both of its ends ask when the next epoch is formed; a
member that is gone is another matter. After `SEPARATE_AFTER` failures in a row the two ends are separated in the
ring, where that is possible. After `EXCLUDE_AFTER` the end that more edges blame is left out for a while, each
time twice as long as before. A step that is committed over an edge clears its failures.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from ft_hsdp.core.grant import Grant, Member, Report

SEPARATE_AFTER = 2  # failures in a row
EXCLUDE_AFTER = 4  # failures in a row
LONGEST_PAUSE_FACTOR = 16  # the longest pause of a replica that is left out, in first pauses

Pair = tuple[int, int]  # replica ids, the lower one first


@dataclass(frozen=True, slots=True)
class Barred:
    """A replica that is left out of the ring for its failed connections."""

    replica: int
    until: float  # seconds on the lighthouse's clock; 0: the pause is over, it is tried again
    pause_s: float  # length of its newest pause; the next one is twice as long


@dataclass(frozen=True, slots=True)
class Edges:
    """What is known of failed connections; durable, so the field names are keys of the store."""

    failures: tuple[tuple[Pair, int], ...] = ()  # failures in a row of each pair
    barred: tuple[Barred, ...] = ()
    counted: int = 0  # the newest epoch whose failures were counted

    @property
    def avoided(self) -> frozenset[Pair]:
        """The pairs that are not to be next to each other in the ring."""
        return frozenset(pair for pair, times in self.failures if times >= SEPARATE_AFTER)

    def excluded(self, now: float = 0.0) -> frozenset[int]:
        """Return the replicas that are left out.

        Args:
            now: Seconds on the lighthouse's clock. At 0 this is who was left out when `record_failures` looked
                last.
        """
        return frozenset(b.replica for b in self.barred if b.until > now)


NO_EDGES = Edges()


@dataclass(frozen=True, slots=True)
class EdgeVerdict:
    """What follows from the failures of an edge."""

    pair: Pair
    failures: int  # in a row
    excluded: int | None = None  # the end that is left out
    pause_s: float = 0.0  # for how long
    stuck: bool = False  # neither end can be left out: too few replicas would be left

    @property
    def reason(self) -> str:
        """The verdict in one line for humans."""
        a, b = self.pair
        text = f"the connection between replicas {a} and {b} failed {self.failures} times in a row"
        if self.stuck:
            return f"{text}; too few replicas would be left without one of them"
        if self.excluded is None:
            return f"{text}; they are put apart in the ring"
        return f"{text}; replica {self.excluded} is left out for {self.pause_s:g} s, then it is tried again"

    @property
    def facts(self) -> dict[str, object]:
        """The further fields of the journal's event."""
        known: dict[str, object] = {"replicas": list(self.pair), "failures": self.failures}
        return known if self.excluded is None else {**known, "excluded": self.excluded, "seconds": self.pause_s}


def remembered(edges: Edges) -> Edges:
    """Return ``edges`` as they count after a restart of the lighthouse, whose clock is another one.

    Replicas that are left out are tried again at once; their next pause is longer all the same.
    """
    return replace(edges, barred=tuple(replace(b, until=0.0) for b in edges.barred))


def neighbours(ring: tuple[int, ...]) -> frozenset[Pair]:
    """Return the pairs that are next to each other in a ring."""
    around = zip(ring, (*ring[1:], *ring[:1]), strict=True)
    return frozenset((min(a, b), max(a, b)) for a, b in around if a != b)


def without_failures(edges: Edges, ring: tuple[int, ...]) -> Edges:
    """Return ``edges`` after a step was committed over ``ring``: its edges work, so their failures are cleared.

    Args:
        edges: What is known.
        ring: The replica ids in ring order.
    """
    if not edges.failures and not edges.barred:
        return edges
    joined = neighbours(ring)
    failures = tuple((pair, times) for pair, times in edges.failures if pair not in joined)
    left = {r for pair, _ in failures for r in pair}
    barred = tuple(b for b in edges.barred if b.replica not in ring or b.replica in left)
    return replace(edges, failures=failures, barred=barred)


def blamed(grant: Grant, reports: Mapping[int, Report]) -> frozenset[Pair]:
    """Return the edges of ``grant`` that failed and whose two ends both ask for the next epoch.

    Args:
        grant: The membership whose ring broke.
        reports: Those of all that ask, by replica.
    """
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


def record_failures(
    edges: Edges,
    grant: Grant,
    reports: Mapping[int, Report],
    spared: Container[int],
    now: float,
    pause_s: float,
) -> tuple[Edges, tuple[EdgeVerdict, ...]]:
    """Count the failed edges of the ring of ``grant``, which broke; each epoch is counted once.

    Args:
        edges: What is known.
        grant: The membership whose ring broke.
        reports: Those of all that ask, by replica.
        spared: The replicas without each of which enough others hold the state to go on.
        now: Seconds on the lighthouse's clock; pauses that are over end.
        pause_s: How long a replica is left out the first time.

    Returns:
        The new counts, and a verdict for each edge that reached a limit.
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
        if times == SEPARATE_AFTER and len(grant.members) >= 4:
            verdicts.append(EdgeVerdict(pair, times))
        if times < EXCLUDE_AFTER or any(r in barred and barred[r].until > now for r in pair):
            continue
        blames = {r: sum(r in other for other in failures) for r in pair}
        able = [r for r in sorted(pair, key=lambda r: (blames[r], r), reverse=True) if r in spared]
        if not able:
            verdicts += [EdgeVerdict(pair, times, stuck=True)] if times == EXCLUDE_AFTER else []
            continue
        known = barred.get(able[0])
        wait_s = pause_s if known is None else min(2 * known.pause_s, LONGEST_PAUSE_FACTOR * pause_s)
        barred[able[0]] = Barred(able[0], now + wait_s, wait_s)
        verdicts.append(EdgeVerdict(pair, times, able[0], wait_s))
        for other in barred:  # a replica that was left out only because of this one can connect to the rest
            partners = {r for p, n in failures.items() if n >= EXCLUDE_AFTER and other in p for r in p} - {other}
            if other != able[0] and partners <= {able[0]}:
                barred[other] = replace(barred[other], until=0.0)
    kept = tuple(barred[r] for r in sorted(barred))
    return replace(edges, failures=tuple(sorted(failures.items())), barred=kept, counted=grant.epoch), tuple(
        verdicts
    )


def arrange(members: Iterable[Member], avoided: frozenset[Pair]) -> tuple[Member, ...]:
    """Return ``members`` in ring order: by id, with few ``avoided`` pairs next to each other.

    The search reverses parts of the ring as long as that separates such pairs; it may miss the best order.

    Args:
        members: The members in any order.
        avoided: Pairs of replica ids, the lower one first.
    """
    ring = sorted(members, key=lambda m: m.replica)
    size = len(ring)

    def bad(a: int, b: int) -> bool:
        x, y = ring[a % size].replica, ring[b % size].replica
        return (min(x, y), max(x, y)) in avoided

    def better(i: int, j: int) -> bool:
        """Return whether to reverse the part from ``i`` + 1 to ``j``."""
        return bad(i, j) + bad(i + 1, j + 1) < bad(i, i + 1) + bad(j, j + 1)

    found = bool(avoided) and size > 3
    while found:
        wrong = [i for i in range(size) if bad(i, i + 1)]
        turns = ((i, j) for w in wrong for i, j in _reversals(w, size) if better(i, j))
        i, j = next(turns, (0, 0))
        found = j > i
        if found:
            ring[i + 1 : j + 1] = reversed(ring[i + 1 : j + 1])
    return tuple(ring)


def _reversals(wrong: int, size: int) -> Iterable[tuple[int, int]]:
    """Return the parts of a ring that begin or end at the pair ``wrong``, ``wrong`` + 1."""
    yield from ((wrong, j) for j in range(wrong + 2, size))
    yield from ((i, wrong) for i in range(wrong - 1))
