"""The rules of the quorum on reports alone: which state to build on, who contributes, whose absence forbids it.

The base of a new membership is the highest state that a reporter holds or is prepared for. It may be granted only
if no absent incarnation that may live could know a higher one (docs/protocol.md has the counter-example behind
each rule). FT-HSDP §4.3 calls the replicas with the highest step number healthy; here states are compared by
(commit_epoch, step) and told apart by lineage.

Edges are connections between two members that both live, but that fail to form or to last. The reports say who
blames whom. An edge counts as failed if both of its ends ask when the next epoch is formed; a member that is gone
is another matter. After `SEPARATE_AFTER` failures in a row the two ends are separated in the ring, where that is
possible. After `EXCLUDE_AFTER` the end that more edges blame is left out for a while, each time twice as long as
before. A step that is committed over an edge clears its failures.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import AttemptId, CommitRecord, void
from ft_hsdp.core.grant import Grant, Member, Report, Role, paths
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.core.state_id import StateId
from ft_hsdp.memory.hosts import Host

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:

    def replace(record: Any, /, **changes: Any) -> Any:
        """Return a copy of a frozen dataclass with some fields changed, as `dataclasses.replace` does.

        That one takes eight times as long for a `LighthouseState` (docs/measurements.md), and a request changes
        several records. A class with slots is left to it.

        Raises:
            TypeError: the class has no such field.
        """
        held = getattr(record, "__dict__", None)
        if held is None:
            return dataclasses.replace(record, **changes)
        copy = object.__new__(type(record))
        copy.__dict__.update(held, **changes)
        if len(copy.__dict__) != len(held):
            raise TypeError(f"{type(record).__name__} has no fields {sorted(changes.keys() - held.keys())}")
        return copy


EPOCHS = 32  # more remembered epochs than these are merged (`merged`)
SEPARATE_AFTER = 2  # failures of an edge in a row
EXCLUDE_AFTER = 4  # failures of an edge in a row
LONGEST_PAUSE_FACTOR = 16  # the longest pause of a replica that is left out, in first pauses

Incarnation = tuple[int, str]  # (replica, name of the incarnation)
Pair = tuple[int, int]  # replica ids, the lower one first


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
class Spread:
    """An incarnation on machines of which no supervisor reports, as far as they were heard since this term began.

    A commit needs the vote of every rank, so an incarnation of which a rank has ended commits nothing more. What
    it has committed until then is known once the ranks that can be heard of have ended, too.
    """

    since: float  # when the first one was heard
    heard: tuple[tuple[float, MachineRanks], ...]  # what each said, and when it was heard last; at least one

    @property
    def who(self) -> Incarnation:
        """Its replica, and its name."""
        return self.heard[0][1].who

    @property
    def machines(self) -> int:
        """On so many it has ranks."""
        return max(said.machines for _, said in self.heard)

    def exited(self, now: float, silence_s: float) -> bool:
        """Return whether it has exited: its ranks on a machine have ended, and none is heard to live on another.

        A machine that was not heard for ``silence_s`` is lost, or cut off with ranks that commit nothing more.

        Args:
            now: In seconds of the lighthouse's clock.
            silence_s: In seconds.
        """
        ended = sum(said.gone for _, said in self.heard)
        living = any(not said.gone and now < at + silence_s for at, said in self.heard)
        return ended > 0 and not living and (ended >= self.machines or now >= self.since + silence_s)


@dataclass(frozen=True, slots=True)
class Base:
    """The state that a membership builds on."""

    state: StateId
    record: CommitRecord | None  # the record that leads to it, if only prepared members hold it
    voids: tuple[AttemptId, ...]  # attempts that can never commit


def highest(reports: Iterable[Report]) -> Base:
    """Return the highest state among ``reports``, committed or prepared, and the prepared record.

    Of two states of one epoch and step, the one that more reporters hold counts. A prepared record does not count
    if its attempt can never commit, or if reporters hold different records of one attempt. Of two records of one
    step and epoch, the one of the later attempt counts. With it come the attempts that reporters never vote for.

    Raises:
        ValueError: there are no reports.
    """
    reports = tuple(reports)
    voids = distinct_attempts(r.void for r in reports if r.void)
    held = Counter(r.state for r in reports)
    best = max(held, key=lambda s: (s.commit_epoch, s.step, held[s]))
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

    Attempts up to one of ``voids`` are void, and a later attempt in the same epoch would have needed that
    member's vote.
    """
    return any((v.epoch, v.step) == (state.commit_epoch, state.step) for v in voids)


def ahead(report: Report, state: StateId) -> bool:
    """Return whether the sender of ``report`` holds, is prepared for or has voted for a state above ``state``."""
    prepared = report.prepared
    if report.doubt is not None and state_id.newer(report.doubt, state):
        return True
    return state_id.newer(report.state, state) or (
        prepared is not None and state_id.newer(prepared.state_id, state)
    )


def follows(head: StateId, base: StateId, epochs: Iterable[Epoch]) -> bool:
    """Return whether ``head`` is known to be the step right after ``base``, by lineage.

    An epoch has one history, so of two of its states the step numbers decide. The first state of an epoch, of
    those ``epochs`` that are remembered, follows the base that it was granted on. The same number of steps in
    another history is not enough.
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
    """Return one of ``epochs`` of which no member is ``present`` although some may live; None if all are covered.

    Members of such an epoch may have committed a step that no present replica knows of. An epoch whose members
    have all ``exited`` does not count.
    """
    for epoch in epochs:
        members = frozenset(epoch.members)
        if not members <= exited and not members & present:
            return epoch
    return None


def merged(epochs: Iterable[Epoch], exited: frozenset[Incarnation]) -> tuple[Epoch, ...]:
    """Return ``epochs``, oldest first, without those that a newer one stands for, if there are more than `EPOCHS`.

    Two epochs are alike if the same members may live and members of the same replicas have ``exited``; the
    newest of them stays. Nothing else counts when a round looks for absent members, and exits only add up, so
    epochs that are alike stay alike. Without this, epochs would pile up for ever while no step commits.
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
    """Return "contribute" if a ``report`` shows ``base`` or exactly the record that leads to it, else "behind"."""
    leads = report.prepared is not None and state_id.same(report.prepared.state_id, base.state)
    return "contribute" if leads or state_id.same(report.state, base.state) else "behind"


def describe(members: Iterable[Member], base: StateId, why: str) -> str:
    """Return a line for people: which ``members`` contribute on ``base``, who is behind, and ``why``."""
    ordered = sorted(members, key=lambda m: m.replica)
    able = [str(m.replica) for m in ordered if m.role == "contribute"]
    behind = [str(m.replica) for m in ordered if m.role == "behind"]
    standby = [str(m.replica) for m in ordered if m.role == "standby"]
    text = f"{why}; replicas {','.join(able) or 'none'} contribute on {base}"
    text += f"; {','.join(standby)} stand by" if standby else ""
    return text + (f"; {','.join(behind)} behind" if behind else "")


def grant(term: int, epoch: int, base: Base, members: tuple[Member, ...], total: int, why: str) -> Grant:
    """Return the grant of ``epoch`` for ``members``, neither signed nor shared out into units (`units.apportion`).

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
    return Grant(term, epoch, base.state, members, total, why, base.voids)


# Edges.


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
        """Return the replicas that are left out ``now``; at 0, since `record_failures` looked last."""
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
    """Return ``edges`` after a step was committed over ``ring``: its edges work, so their failures are cleared."""
    if not edges.failures and not edges.barred:
        return edges
    joined = neighbours(ring)
    failures = tuple((pair, times) for pair, times in edges.failures if pair not in joined)
    left = {r for pair, _ in failures for r in pair}
    barred = tuple(b for b in edges.barred if b.replica not in ring or b.replica in left)
    return replace(edges, failures=failures, barred=barred)


def blamed(grant: Grant, reports: Mapping[int, Report]) -> frozenset[Pair]:
    """Return the failed edges of ``grant`` whose two ends both ask for another epoch, by their ``reports``."""
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
    """Return ``members`` in ring order: by zone, rack and id, few ``avoided`` pairs of ids beside each other.

    So a ring over k zones crosses their borders k times, which is the least: links between zones are slow (FT-HSDP
    2.1). The search reverses parts of the ring as long as that separates such pairs, where it can without more
    crossings; it may miss the best order.
    """
    members = tuple(members)
    where = {m.replica: [(h.zone, h.rack) for h in map(Host.parse, paths(m.hosts))] for m in members}
    ring = sorted(members, key=lambda m: (where[m.replica], m.replica))
    size = len(ring)

    def bad(a: int, b: int) -> bool:
        x, y = ring[a % size].replica, ring[b % size].replica
        return (min(x, y), max(x, y)) in avoided

    def crosses(a: int, b: int) -> bool:
        x, y = where[ring[a % size].replica], where[ring[b % size].replica]
        return [zone for zone, _ in x] != [zone for zone, _ in y]

    def gain(i: int, j: int) -> tuple[int, ...]:
        """Return by how many pairs and borders reversing ``i`` + 1 to ``j`` is better."""
        new, old = ((i, j), (i + 1, j + 1)), ((i, i + 1), (j, j + 1))
        return tuple(sum(costs(*e) for e in old) - sum(costs(*e) for e in new) for costs in (bad, crosses))

    found = bool(avoided) and size > 3
    while found:
        wrong = [i for i in range(size) if bad(i, i + 1)]
        turns = {turn: gain(*turn) for w in wrong for turn in _reversals(w, size)}
        i, j = max(turns, key=lambda turn: turns[turn], default=(0, 0))
        found = turns.get((i, j), (0, 0))[0] > 0
        if found:
            ring[i + 1 : j + 1] = reversed(ring[i + 1 : j + 1])
    return tuple(ring)


def _reversals(wrong: int, size: int) -> Iterable[tuple[int, int]]:
    """Yield the parts of a ring that begin or end at the pair ``wrong``, ``wrong`` + 1."""
    yield from ((wrong, j) for j in range(wrong + 2, size))
    yield from ((i, wrong) for i in range(wrong - 1))
