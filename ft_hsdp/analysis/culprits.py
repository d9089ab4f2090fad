"""Who keeps a job waiting: the wait-for graph of collectives, then of ranks (FT-HSDP §2.3). Pure.

A rank waits in a collective that it has begun and that has not ended. It waits for the members that have not begun
it. Such an absent member is excused if it waits itself, in another collective, before it can come: then that one
is what keeps it. An absent member without an excuse is a culprit: it did not join. So is a rank of which nothing
is heard, as soon as others wait for it.

If all members have begun a collective and it does not end, one of them joined and made no progress. Members that
have not ended what others have ended are culprits. In a ring the counts of chunks tell more: a rank that waits for
its left neighbour passes the question on to it. Where the left has sent more than has arrived, the connection
between the two has lost it, unless the right one is not waiting for a chunk at all: then its engine hangs.

A slow job has no absent members. In each group the slow rank comes last, so it waits least: what it adds to a step
is how much later it begins the same collectives than the others. A slow connection makes all members of its ring
wait alike; its left end alone waits for its right end to take what was sent.

Whose word counts. A replica may be wrong in all that it tells, and may keep back what others wait for. So a
finding has *witnesses*: other replicas of which a rank waits in an all-reduce of a ring, or for votes, which the
culprit has not begun by its own word (or in which its engine hangs). One of two is right. There are none

- if a rank of the culprit's replica waits in a ring: a neighbour may keep back a chunk;
- if the culprit waits for votes, or has got on lately;
- if its whole replica is silent: it may be cut off from the lighthouse alone;
- if ranks of several replicas are named.

Example: replica 2 keeps back a chunk that 1 needs, and tells that it waits for the vote of 1. Replica 0 does wait
for that vote, so 1 is found stuck. But 1 tells that it waits in its ring: the finding has no witness.

Example: replicas 0 and 1 of two ranks each. Rank 1/1 hangs before an all_gather. Rank 1/0 waits in the all_gather
for it. Rank 0/0 waits in ring 0 for 1/0, which is excused. So 1/1 is the only culprit, and three ranks wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median, median_low
from typing import Literal

from ft_hsdp.core.traces import COMMIT, GroupTrace, Heard, Mark, RankId, epoch_of

SILENT_S = 1.7  # without a sign of life; ranks give one about once a second
SETTLED_S = 1.5  # for which a rank stands still that does not get on

Kind = Literal["silent", "absent", "stuck", "link", "deadlock", "slow", "slow link"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A culprit, or several ranks one of which is."""

    kind: Kind
    ranks: tuple[RankId, ...]  # of a connection: its left and its right end
    why: str = field(compare=False)
    waiting: int = field(compare=False)  # ranks that wait for it directly
    witnesses: int = field(default=0, compare=False)  # other replicas that wait for it, as said above
    epoch: int = field(default=0, compare=False)  # in whose rings and commits these wait


@dataclass(frozen=True, slots=True)
class BlockedCollective:
    """A collective that has not ended."""

    group: str
    number: int
    op: str
    waiting: tuple[RankId, ...]
    absent: tuple[RankId, ...]  # who has not begun it; none: all have


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    waits: tuple[BlockedCollective, ...]


@dataclass(slots=True)
class _Group:
    """One group of ranks. Counts of silent members are as of their last word."""

    name: str
    members: dict[RankId, GroupTrace] = field(default_factory=dict)

    @property
    def is_ring(self) -> bool:
        return next(iter(self.members.values())).left is not None

    def waits(self, live: Mapping[RankId, Heard]) -> Iterable[BlockedCollective]:
        """Yield the oldest collective in which each member waits that lives, with who is absent."""
        ended = max(trace.done for trace in self.members.values())
        begun = {rank: max(trace.joined, ended) for rank, trace in self.members.items()}
        waiting: defaultdict[int, list[RankId]] = defaultdict(list)
        for rank, trace in self.members.items():
            if trace.joined > trace.done and rank in live and live[rank].still_s:
                waiting[trace.done + 1].append(rank)
        for number, ranks in waiting.items():
            absent = tuple(rank for rank, joined in begun.items() if joined < number)
            op = next((t.op for r in ranks if (t := self.members[r]).joined == number), "")
            yield BlockedCollective(self.name, number, op, tuple(ranks), absent)


def _groups(heard: Mapping[RankId, Heard]) -> dict[str, _Group]:
    found: dict[str, _Group] = {}
    for rank, known in heard.items():
        for trace in known.trace.groups if known.trace is not None else ():
            group = found.get(trace.name)
            if group is None:
                group = found[trace.name] = _Group(trace.name)
            group.members[rank] = trace
    return found


def find(heard: Mapping[RankId, Heard]) -> Diagnosis:
    """Return who keeps a job waiting that has stopped."""
    return _Stopped(heard).diagnosis()


class _Stopped:
    def __init__(self, heard: Mapping[RankId, Heard]) -> None:
        self._heard = heard
        self._live = {r: known for r, known in heard.items() if known.age_s <= SILENT_S}
        self._groups = _groups({r: k for r, k in heard.items() if k.trace is not None})
        self._waits = [wait for group in self._groups.values() for wait in group.waits(self._live)]
        self._in: defaultdict[RankId, list[BlockedCollective]] = defaultdict(list)  # what each rank waits in
        for wait in self._waits:
            for rank in wait.waiting:
                self._in[rank].append(wait)
        self._found: dict[tuple[Kind, tuple[RankId, ...]], tuple[int, Finding]] = {}

    def diagnosis(self) -> Diagnosis:
        for wait in self._waits:
            for rank in wait.absent:
                if not self._excused(rank, wait):
                    self._blame_absent(rank, wait)
            if self._is_ring(wait):
                self._broken_edges(wait)
            if not wait.absent:
                self._stuck(wait)
        if not self._found and self._waits:
            self._circle()
        found = [finding for _, finding in self._found.values()]
        if len({rank.replica for finding in found for rank in finding.ranks}) == 1:
            found = [self._with_witnesses(finding) for finding in found]
        return Diagnosis(tuple(found), tuple(self._waits))

    def _with_witnesses(self, finding: Finding) -> Finding:
        """Return a finding on ranks of one replica with its witnesses."""
        replica = finding.ranks[0].replica
        live = [rank for rank in self._live if rank.replica == replica]
        if not live or any(_held_up(trace) for rank in live for trace in self._shared(rank)):
            return finding
        waiting: defaultdict[int, set[int]] = defaultdict(set)  # the other replicas, by epoch
        for rank in finding.ranks:
            known, shared, lives = self._heard[rank], self._shared(rank), rank in self._live
            lately = known.still_s + known.age_s < SETTLED_S
            if lives and (lately or any(t.name.startswith(COMMIT) and t.joined > t.done for t in shared)):
                return finding
            for trace in shared:
                begun = trace.done if lives and _hangs(trace) else trace.joined
                for wait in self._waits:
                    if wait.group == trace.name and wait.number > begun:
                        waiting[epoch_of(trace.name) or 0].update(r.replica for r in wait.waiting)
        epoch = max(waiting, default=0)
        return replace(finding, witnesses=len(waiting[epoch] - {replica}), epoch=epoch)

    def _shared(self, rank: RankId) -> list[GroupTrace]:
        """Return what a rank has told of its rings and of commits."""
        trace = self._heard[rank].trace
        return [] if trace is None else [group for group in trace.groups if epoch_of(group.name) is not None]

    def _excused(self, rank: RankId, wait: BlockedCollective) -> bool:
        """Return whether an absent rank cannot come because it waits itself.

        What the engine of a ring waits in keeps the main thread from nothing but the vote.
        """
        if rank not in self._live:
            return False
        mine = [each for each in self._in[rank] if (each.group, each.number) != (wait.group, wait.number)]
        if wait.group.startswith(COMMIT) or self._is_ring(wait):
            return bool(mine)
        return any(not self._is_ring(each) for each in mine)

    def _is_ring(self, wait: BlockedCollective) -> bool:
        return self._groups[wait.group].is_ring

    def _blame(self, kind: Kind, ranks: tuple[RankId, ...], why: str, wait: BlockedCollective) -> None:
        """Note a finding; of several that name the same ranks, the one that is nearest to them."""
        near = 0 if wait.group.startswith(COMMIT) else 1 if self._is_ring(wait) else 2
        known = self._found.get((kind, ranks))
        if known is None or known[0] < near:
            self._found[kind, ranks] = near, Finding(kind, ranks, why, len(wait.waiting))

    def _blame_absent(self, rank: RankId, wait: BlockedCollective) -> None:
        if rank not in self._live:
            self._blame_silent(rank, wait)
        elif self._heard[rank].still_s:
            why = f"rank {rank} has not joined {_named(wait)}, in which {_count(wait.waiting)}"
            self._blame("absent", (rank,), why, wait)

    def _blame_silent(self, rank: RankId, wait: BlockedCollective) -> None:
        silence = f"nothing is heard of rank {rank} for {self._heard[rank].age_s:.1f} s"
        self._blame("silent", (rank,), f"{silence}; {_count(wait.waiting)} in {_named(wait)}", wait)

    def _stuck(self, wait: BlockedCollective) -> None:
        """Look for the culprit in a collective that all members have begun."""
        members = self._groups[wait.group].members
        if any(rank in self._live and not self._heard[rank].still_s for rank in members):
            return
        silent = [rank for rank in members if rank not in self._live]
        if silent:
            for rank in silent:
                self._blame_silent(rank, wait)
            return
        left = wait.waiting
        if self._is_ring(wait):
            if not any(rank in ranks for _, ranks in self._found for rank in members):
                least = min(members[rank].sent - members[rank].received for rank in left)
                ranks = tuple(r for r in left if members[r].sent - members[r].received == least)
                why = f"rank {_some(ranks)} passes nothing on in {_named(wait)}"
                self._blame("stuck", ranks, why, wait)
        elif len(left) < len(members):  # what one does not pass on, the next ones lack
            order, lack = sorted(members), set(left)
            for before, rank in zip(order[-1:] + order, order, strict=False):
                if rank in lack and before not in lack:
                    why = f"rank {rank} does not finish {_named(wait)}, which others have finished"
                    self._blame("stuck", (rank,), why, wait)
        else:
            self._blame("stuck", left, f"all have joined {_named(wait)}, and it does not end", wait)

    def _broken_edges(self, wait: BlockedCollective) -> None:
        """Blame engines that hang, and connections that have lost chunks, also while others are absent."""
        members = self._groups[wait.group].members
        at = {rank: members[rank] for rank in wait.waiting}
        # A left neighbour that has ended the collective knows that all its chunks of it were taken.
        lefts = {rank: members[t.left] for rank, t in at.items() if t.left in at}
        for rank, trace in at.items():
            if not trace.awaits:
                why = f"the engine of rank {rank} hangs in {_named(wait)}"
                self._blame("stuck", (rank,), why, wait)
            elif rank in lefts and trace.left is not None and lefts[rank].sent > trace.received:
                lost = lefts[rank].sent - trace.received
                what = "1 chunk" if lost == 1 else f"{lost} chunks"
                why = f"rank {trace.left} has sent rank {rank} {what} of {_named(wait)} that did not arrive"
                self._blame("link", (trace.left, rank), why, wait)

    def _circle(self) -> None:
        """Blame the ranks that wait for each other in a circle."""
        rank = next(rank for wait in self._waits for rank in wait.waiting)
        path: dict[RankId, None] = {}
        while rank not in path:
            path[rank] = None
            onward = [x for wait in self._in[rank] for x in wait.absent if self._in[x]]
            if not onward:
                return
            rank = onward[0]
        order = list(path)
        ranks = tuple(order[order.index(rank) :])
        self._blame("deadlock", ranks, "these ranks wait for each other", self._in[rank][0])


def _hangs(trace: GroupTrace) -> bool:
    """Return whether the engine of a ring is in an all-reduce and waits for no neighbour."""
    return not trace.name.startswith(COMMIT) and trace.joined > trace.done and not trace.awaits


def _held_up(trace: GroupTrace) -> bool:
    """Return whether a rank waits for a neighbour in a ring."""
    return not trace.name.startswith(COMMIT) and trace.joined > trace.done and bool(trace.awaits)


def _named(wait: BlockedCollective) -> str:
    return f"{wait.op or 'collective'}, number {wait.number} of {wait.group}"


def _some(ranks: tuple[RankId, ...]) -> str:
    return ", ".join(map(str, ranks[:3])) + (", ..." if len(ranks) > 3 else "")


def _count(ranks: tuple[RankId, ...]) -> str:
    return f"{len(ranks)} rank waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait"


LATE_S = 0.004  # later than the others by less is no finding: clocks of hosts differ
LATE_SHARE = 0.25  # of the time between two collectives, that a slow rank is late
LATE_TIMES = 2.0  # the slowest has to be so much later than the next one of its group
BLOCKED = 0.1  # of the time in all-reduces, that a left end of a slow connection is blocked longer than others
LEAST_S = 0.5  # in all-reduces; what a rank tells of less is left out
BLOCKED_TIMES = 3.0  # ... and so much longer than in the other rings of the two replicas


def find_slow(heard: Mapping[RankId, Heard]) -> Diagnosis:
    """Return which ranks or connections slow down a job that goes on. Nobody waits for long, so no wait is listed.

    Args:
        heard: All ranks of the job; traces may be some seconds old.
    """
    groups = _groups(heard)
    links = list(_slow_links(group for group in groups.values() if group.is_ring))
    found = [
        *links,
        *_slow_ranks(group for group in groups.values() if not (group.is_ring or group.name.startswith(COMMIT))),
    ]
    return Diagnosis(tuple(found), ())


def _slow_links(rings: Iterable[_Group]) -> Iterable[Finding]:
    blocked: defaultdict[tuple[int, int], dict[tuple[RankId, RankId], float]] = defaultdict(dict)
    for ring in rings:
        shares = {r: trace.blocked_s / trace.in_s for r, trace in ring.members.items() if trace.in_s > LEAST_S}
        usual = median(shares.values()) if shares else 0.0
        for rank, trace in ring.members.items():
            if trace.left is not None and trace.left in shares:
                edge = trace.left, rank
                blocked[trace.left.replica, rank.replica][edge] = shares[trace.left] - usual
    for lanes in blocked.values():
        ordered = sorted(lanes.values())
        for (left, right), share in lanes.items():
            elsewhere = _median_without(ordered, share) if len(ordered) > 1 else 0.0
            if share > max(BLOCKED, BLOCKED_TIMES * elsewhere):
                why = f"rank {left} is blocked by rank {right} for {share:.0%} of its time in all-reduces"
                yield Finding("slow link", (left, right), why, 0)


def _slow_ranks(groups: Iterable[_Group]) -> Iterable[Finding]:
    found: dict[RankId, tuple[float, str]] = {}
    last: dict[str, RankId] = {}  # by group
    member_of: defaultdict[RankId, list[str]] = defaultdict(list)
    for group in groups:
        for rank in group.members:
            member_of[rank].append(group.name)
        begun: defaultdict[int, dict[RankId, float]] = defaultdict(dict)
        for rank, trace in group.members.items():
            for mark in trace.marks:
                begun[mark.number][rank] = mark.t
        late: defaultdict[RankId, list[float]] = defaultdict(list)
        for times in begun.values():
            if 2 * len(times) < len(group.members) or len(times) < 2:
                continue
            ordered = sorted(times.values())
            for rank, t in times.items():
                late[rank].append(t - _median_without(ordered, t))
        usual = sorted((median_low(each), rank) for rank, each in late.items() if len(each) > 1)
        if len(usual) < 2 or len(begun) < 2:
            continue
        (next_s, _), (most_s, rank) = usual[-2:]
        least_s = max(LATE_S, LATE_TIMES * next_s, LATE_SHARE * _apart(group.members[rank].marks))
        if most_s > least_s:
            last[group.name] = rank
            found[rank] = max((most_s, group.name), found.get(rank, (0.0, "")))
    # Who waits for another one in one group comes late in its other groups.
    roots = [rank for rank in found if all(last.get(name, rank) == rank for name in member_of[rank])]
    for rank in roots or found:
        seconds, name = found[rank]
        yield Finding("slow", (rank,), f"rank {rank} begins collectives of {name} {seconds * 1e3:.0f} ms late", 0)


def _apart(marks: Sequence[Mark]) -> float:
    """Return the seconds between two collectives; infinity if there are too few marks."""
    first, last = marks[0], marks[-1]
    return (last.t - first.t) / (last.number - first.number) if last.number > first.number else inf


def _median_without(ordered: list[float], one: float) -> float:
    """Return the median of all but one value of a sorted list."""
    left, place = len(ordered) - 1, bisect_left(ordered, one)
    low, high = (n + (n >= place) for n in ((left - 1) // 2, left // 2))
    return (ordered[low] + ordered[high]) / 2
