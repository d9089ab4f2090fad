"""Emulated traces of a job's collectives, with injected faults. They judge the analysis of hangs and slowness.

`case(seed)` plays some steps of a job of R replicas with K ranks each. It returns what the lighthouse has heard at
a time after the fault. Times follow by recursion: a collective ends some time after its last member has joined,
and what never happens has the time infinity. So nothing here says who waits for a fault: it follows.

A step: all_gather for each layer, reduce_scatter for each layer, one ring all-reduce for each bucket on an engine
beside the backward pass, then the vote. Some jobs have smaller groups inside a replica, as tensor and pipeline
parallelism do, and some join their all_gathers one layer ahead.

The faults, by kind:
    before: a main thread stops in user code before a collective or the vote.
    in: a rank is in a collective and does nothing more for it. Others may have what they need already.
    after: a main thread stops right after a collective or a commit, or an engine after an all-reduce.
    dead: a process ends; in half of the cases it is known how.
    lost: a chunk of a ring is lost on its way.
    silent: a process is stopped as a whole.
    slow_rank: 2 to 5 times the compute, for 20 steps or more.
    slow_link: a quarter to a twentieth of the bandwidth of an edge, for 20 steps or more.
    two: two of these at about the same time. Both hang, or both are slow: a job that hangs shows no slowness.

Who moves tells its counts every 10 s, who stands still tells them every second. `age_s` counts from the last sign
of life, which may be later than the counts: one comes every second.

Seeds 0 to 499 are for development. Seeds from 10,000 on (three times 500) are for the final figure only: whoever
develops the analysis does not look at them. This file came before the analysis and does not follow it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ft_hsdp.core.traces import COMMIT, MARKED, GroupTrace, Heard, Mark, RankId, RankTrace
from tests.model.exchange import NEVER, Exchange, Times

CHUNK = 2**20  # bytes
KEPT = 4  # marks that are told
TOLD_S = 10.0  # seconds that the times of a ring are of
HEALTHY = 3  # steps before the fault
EPOCH = 7
LARGE = 8192  # ranks of a job that is played for few steps only, to measure how fast an analysis is
START = 1.7e9  # Unix seconds
LATENCY = 1e-3  # of a commit, seconds

HANGS = ("before", "in", "after", "dead", "lost", "silent")
SLOW = ("slow_rank", "slow_link")
KINDS = (*HANGS, *SLOW, "two")
EDGES = ("lost", "slow_link")


@dataclass(frozen=True)
class Shape:
    """What a job does in a step."""

    layers: int
    buckets: int
    chunks: int  # of a shard, in each bucket
    compute_s: float  # of a step
    bytes_s: float  # of an edge of a ring

    @property
    def hop_s(self) -> float:
        return CHUNK / self.bytes_s


RECORDED = Shape(layers=3, buckets=2, chunks=1, compute_s=0.15, bytes_s=2.5e8)


@dataclass(frozen=True)
class Case:
    """A fault, and what is known of a job after it."""

    seed: int
    kind: str
    heard: dict[RankId, Heard]
    culprits: tuple[frozenset[RankId], ...]  # of each fault: a rank, or the two ends of an edge
    stopped: bool  # no step is committed any more


@dataclass(frozen=True)
class Verdict:
    """How good an analysis of a case is."""

    exact: bool  # each fault has a finding that names just its ranks
    within: bool  # each fault has a rank in a finding of three ranks at most
    false: int  # findings that name no rank of a fault


def judge(case: Case, named: Sequence[frozenset[RankId]]) -> Verdict:
    """Compare the findings of an analysis with the faults; one end of an edge alone is not exact."""
    exact = all(fault in named for fault in case.culprits)
    within = all(any(fault & found and len(found) <= 3 for found in named) for fault in case.culprits)
    return Verdict(exact, within, sum(not any(fault & found for fault in case.culprits) for found in named))


@dataclass
class Group:
    """The collectives of a torch group, or the votes."""

    name: str
    members: list[int]  # ranks of the replica
    joins: list[Times] = field(default_factory=list)  # of each collective, by index of the member
    dones: list[Times] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)

    def counts(self, i: int, t: float) -> tuple[int, int]:
        """Return how many a member has joined until `t`, and how many of them were done."""
        joined = bisect_right(self.joins, t, key=lambda row: row[i])
        return joined, bisect_right(self.dones, t, key=lambda row: row[i])


@dataclass
class Fault:
    """What goes wrong. Which of the fields matter depends on the kind."""

    kind: str
    rank: RankId  # of an edge: the right end
    left: RankId | None = None  # of an edge
    op: int = -1  # number of the operation in the step; -1: the fault is on the engine
    bucket: int = 0
    chunk: int = 0
    factor: float = 1.0
    share: float = 0.0  # part of the step, or of a collective's members
    at: float = NEVER  # time of death
    struck: bool = False

    @property
    def ranks(self) -> frozenset[RankId]:
        return frozenset({self.rank} if self.left is None else {self.rank, self.left})


class Job:
    """The times of all collectives of some steps."""

    def __init__(self, rng: random.Random, replicas: int, ranks: int, shape: Shape) -> None:
        self.rng, self.replicas, self.ranks, self.shape = rng, replicas, ranks, shape
        self.ring = rng.sample(range(replicas), replicas)
        self.ahead = rng.random() < 0.4  # joins the next all_gather before it computes
        self.history = rng.randrange(30, 500)  # healthy steps before those that are played
        wide = rng.choice([w for w in (2, 4, 8) if ranks % w == 0] or [ranks]) if rng.random() < 0.5 else 0
        cuts = [[list(range(k, k + wide)) for k in range(0, ranks, wide)]] if 1 < wide < ranks else []
        if cuts and rng.random() < 0.5:
            cuts.append([list(range(k, ranks, wide)) for k in range(wide)])
        self.whole = [Group(f"{r}:0", list(range(ranks))) for r in range(replicas)]
        self.parts: list[list[list[Group]]] = []  # of each replica, of each way to cut it
        for r in range(replicas):
            numbers = iter(range(1, 2 * ranks))
            self.parts.append([[Group(f"{r}:{next(numbers)}", part) for part in cut] for cut in cuts])
        self.commit = Group(COMMIT, list(range(replicas * ranks)))
        self.rings: list[list[Exchange]] = [[] for _ in range(ranks)]
        self.program = self._program(len(cuts))
        hosts = rng.choice([h for h in (1, 2, 4, 8) if h <= ranks])
        self.clocks = [[rng.uniform(-1e-3, 1e-3) for _ in range(hosts)] for _ in range(replicas)]
        slower = rng.randrange(replicas), rng.randrange(hosts)
        self.pace = [
            [(1.05 if (r, k * hosts // ranks) == slower else 1.0) * rng.uniform(0.99, 1.01) for k in range(ranks)]
            for r in range(replicas)
        ]
        self.now: list[Times] = [[START] * ranks for _ in range(replicas)]
        self.faults: list[Fault] = []
        self.until: dict[RankId, float] = {}

    def _program(self, cuts: int) -> list[tuple[str, int, float]]:
        """Return the operations of a step: what it is, its number, and the seconds of compute before it."""
        layers, buckets = self.shape.layers, self.shape.buckets
        there = self.shape.compute_s / 3 / layers / (1 + cuts)
        program: list[tuple[str, int, float]] = []
        for layer in range(layers):
            program += [("all_gather", layer, there), *(("part", cut, there) for cut in range(cuts))]
        for layer in range(layers):
            program += [("part", cut, 2 * there) for cut in range(cuts)]
            program.append(("reduce_scatter", layer, 2 * there))
            done, due = (layer + 1) * buckets // layers, layer * buckets // layers
            program += [("bucket", bucket, 0.0) for bucket in range(due, done)]
        return [*program, ("vote", 0, self.shape.compute_s / 50)]

    def step(self, slow: bool = False) -> bool:
        """Play one step with the faults; return whether it was committed everywhere."""
        rng = self.rng
        pace = [[p * (1.2 if rng.random() < 0.01 else 1.0) for p in row] for row in self.pace]
        for fault in self.faults:
            if fault.kind == "slow_rank" and slow:
                pace[fault.rank.replica][fault.rank.rank] *= fault.factor
        ready: list[list[Times]] = [[] for _ in range(self.replicas)]  # of each replica and bucket
        for r in range(self.replicas):
            self._main(r, pace[r], ready[r])
        free = [[START] * self.ranks for _ in range(self.replicas)]
        for bucket in range(self.shape.buckets):
            for k in range(self.ranks):
                enter = [max(ready[r][bucket][k], free[r][k]) for r in self.ring]
                self._exchange(k, bucket, enter, free, slow)
        votes = [max(a, b) for n, f in zip(self.now, free, strict=True) for a, b in zip(n, f, strict=True)]
        for rank, t in self.until.items():
            if votes[rank.replica * self.ranks + rank.rank] > t:
                votes[rank.replica * self.ranks + rank.rank] = NEVER
        t = max(votes) + LATENCY
        done = [t + 2e-3 * rng.random() for _ in votes]
        self._note(self.commit, votes, done, "vote")
        self.now = [done[r * self.ranks : (r + 1) * self.ranks] for r in range(self.replicas)]
        for fault in self.faults:
            if fault.kind == "after" and fault.op == len(self.program) - 1:
                self._halt(fault)
        return t < NEVER

    def _main(self, r: int, pace: Times, ready: list[Times]) -> None:
        """Play the main threads of a replica up to their votes."""
        rng, joined, pending = self.rng, None, self.now[r]
        here = [f for f in self.faults if f.rank.replica == r]
        for op, (what, number, compute) in enumerate(self.program):
            for fault in here:
                if fault.kind == "before" and fault.op == op:
                    self._halt(fault)
            if joined is None or what != "all_gather":
                scale = compute * 0.9
                self.now[r] = [
                    n + scale * p * (1 + 0.222 * rng.random()) for n, p in zip(self.now[r], pace, strict=True)
                ]
                if rng.random() < 0.02:  # garbage is collected
                    self.now[r][rng.randrange(self.ranks)] += rng.uniform(0.05, 0.2)
            if self.until:
                self._bury(r)
            if what in ("reduce_scatter", "bucket", "vote"):
                self.now[r] = list(map(max, self.now[r], pending))
            if what == "all_gather":
                done = self._collective(r, self.whole[r], joined or self.now[r], what, op)
                self.now[r] = list(map(max, self.now[r], done))
                joined = None
                if self.ahead and number + 1 < self.shape.layers:
                    for fault in here:
                        if fault.kind == "before" and fault.op == self.op("all_gather", number + 1):
                            self._halt(fault)
                    joined = self.now[r]
                    self.now[r] = [
                        n + compute * p * (0.9 + 0.2 * rng.random()) for n, p in zip(joined, pace, strict=True)
                    ]
            elif what == "reduce_scatter":
                pending = self._collective(r, self.whole[r], self.now[r], what, op)
                if not self.ahead:
                    self.now[r] = pending
            elif what == "part":
                for group in self.parts[r][number]:
                    joins = [self.now[r][k] for k in group.members]
                    done = self._collective(r, group, joins, ("all_reduce", "all_to_all")[number], op)
                    for k, t in zip(group.members, done, strict=True):
                        self.now[r][k] = t
            elif what == "bucket":
                ready.append(self.now[r])
            for fault in here:
                if fault.kind == "after" and fault.op == op < len(self.program) - 1:
                    self._halt(fault)

    def op(self, what: str, number: int) -> int:
        """Return the number of an operation in the step."""
        return next(i for i, (w, n, _) in enumerate(self.program) if (w, n) == (what, number))

    def _collective(self, r: int, group: Group, joins: Times, what: str, op: int) -> Times:
        t = max(max(joins), max(group.dones[-1]) if group.dones else 0.0) + self.shape.hop_s
        for rank, end in self.until.items():
            if rank.replica == r and rank.rank in group.members and t > end:
                t = NEVER
        done = [t] * len(joins)
        for fault in self.faults:
            if (fault.kind, fault.op, fault.rank.replica) == ("in", op, r) and fault.rank.rank in group.members:
                fault.struck |= t < NEVER
                self._wedge(done, group.members.index(fault.rank.rank), fault.share)
        self._note(group, joins, done, what)
        return done

    @staticmethod
    def _wedge(done: Times, at: int, share: float) -> None:
        """Let a member pass on no more; only some of the members before it have all that they need by then.

        Rings inside a collective go by index: what a member has not passed on is missing at those after it.
        """
        for i in range(len(done) - round(share * (len(done) - 1))):
            done[(at + i) % len(done)] = NEVER

    @staticmethod
    def _note(group: Group, joins: Times, done: Times, what: str) -> None:
        group.joins.append(list(joins))
        group.dones.append(done)
        group.ops.append(what)

    def _halt(self, fault: Fault) -> None:
        row = self.now[fault.rank.replica] = list(self.now[fault.rank.replica])
        fault.struck |= row[fault.rank.rank] < NEVER
        row[fault.rank.rank] = NEVER

    def _bury(self, r: int) -> None:
        for rank, t in self.until.items():
            if rank.replica == r and self.now[r][rank.rank] > t:
                self.now[r][rank.rank] = NEVER

    def _exchange(self, k: int, bucket: int, enter: Times, free: list[Times], slow: bool) -> None:
        hops, stops, lost, until = [self.shape.hop_s] * self.replicas, {}, {}, {}
        here = [(self.ring.index(f.rank.replica), f) for f in self.faults if f.rank.rank == k]
        for position, fault in here:
            if fault.kind == "slow_link" and slow:
                hops[position] *= fault.factor
            if fault.op < 0 and fault.bucket == bucket and fault.kind == "in":
                stops[position] = fault.chunk
            if fault.kind == "lost" and fault.bucket == bucket:
                lost[position] = fault.chunk
            if fault.rank in self.until:
                until[position] = self.until[fault.rank]
                enter[position] = enter[position] if enter[position] <= until[position] else NEVER
        works = [self.shape.hop_s / 4 * self.pace[r][k] for r in self.ring]
        found = Exchange(enter, hops, works, self.shape.chunks, until, stops, lost).run()
        found.forget()
        self.rings[k].append(found)
        for r, t in zip(self.ring, found.end, strict=True):
            free[r][k] = t
        for position, fault in here:
            fault.struck |= position in found.struck
            if fault.kind == "after" and fault.op < 0 and fault.bucket == bucket:
                fault.struck |= found.end[position] < NEVER
                free[fault.rank.replica][k] = NEVER

    # What a rank tells.

    def trace(self, rank: RankId, t: float, rng: random.Random | None, doing: str = "") -> RankTrace:
        """Return what a rank tells at a time."""
        r, k = rank
        clock = self.clocks[r][k * len(self.clocks[r]) // self.ranks]
        groups = []
        for group, i in self._groups(rank):
            joined, done = group.counts(i, t)
            base = self.history * (1 if group is self.commit else 2 * self.shape.layers)
            marks = _marks(base, [row[i] + clock for row in group.joins[:joined]])
            op = group.ops[joined - 1] if joined else ""
            groups.append(GroupTrace(group.name, base + joined, base + done, op, marks=marks))
        stack: tuple[str, ...] = ()
        if rng is not None and rng.random() < 0.5:
            doing = rng.choice(("forward", "backward"))
            stack = (f"train.py:{rng.randrange(20, 90)} {doing}",) if rng.random() < 0.2 else ()
        found = (groups[0], *groups[1:-1], self._ring(rank, t, clock), groups[-1])
        return RankTrace(found, doing, stack)

    def _groups(self, rank: RankId) -> list[tuple[Group, int]]:
        """Return the groups of a rank but its ring, and its index in each."""
        r, k = rank
        own = [self.whole[r], *(g for cut in self.parts[r] for g in cut if k in g.members)]
        return [*((g, g.members.index(k)) for g in own), (self.commit, r * self.ranks + k)]

    def changed(self, rank: RankId, t: float) -> float:
        """Return when a count of a rank has changed last, before `t`."""
        newest = START
        for group, i in self._groups(rank):
            joined, done = group.counts(i, t)
            newest = max([newest, *(row[i] for row in group.joins[:joined][-1:] + group.dones[:done][-1:])])
        ring, position = self.rings[rank.rank], self.ring.index(rank.replica)
        done = bisect_right(ring, t, key=lambda e: e.end[position])
        if done < len(ring) and ring[done].enter[position] <= t:
            return max(newest, ring[done].counts(position, t)[2])
        return max(newest, ring[done - 1].end[position]) if done else newest

    def _ring(self, rank: RankId, t: float, clock: float) -> GroupTrace:
        r, k = rank
        ring, position = self.rings[k], self.ring.index(r)
        each, buckets = self.shape.chunks * (2 * self.replicas - 2), self.shape.buckets
        joined = bisect_right(ring, t, key=lambda e: e.enter[position])
        done = bisect_right(ring, t, key=lambda e: e.end[position])
        base = self.history * buckets
        spent = [e.spent(position, t) for e in ring[:joined] if e.enter[position] > t - TOLD_S]
        in_s, blocked_s = (sum(e[i] for e in spent) for i in range(2))
        received = sent = (base + done) * each
        if joined > done:
            took, gave, _ = ring[done].counts(position, t)
            received, sent = received + took, sent + gave
        marks = _marks(base, [each.enter[position] + clock for each in ring[:joined]])
        op = f"bucket {(joined - 1) % buckets}" if joined else ""
        left = RankId(self.ring[position - 1], k)
        name = f"ring {k} of epoch {EPOCH}"
        awaits = ring[done].awaits(position, t) if joined > done else ""
        counts = base + joined, base + done, op, left, received, sent
        return GroupTrace(name, *counts, awaits, in_s, blocked_s, marks)


def _marks(base: int, begun: Times) -> tuple[Mark, ...]:
    """Return the marks of the collectives that were played, which are counted from `base`."""
    newest = len(begun) - (base + len(begun)) % MARKED
    numbers = [n for n in range(newest - MARKED * (KEPT - 1), newest + 1, MARKED) if n >= MARKED]
    return tuple(Mark(base + n, fmean(begun[n - MARKED : n])) for n in numbers)


def _draw(rng: random.Random, job: Job, kind: str, other: Fault | None) -> Fault:
    """Return a fault of a kind, away from the `other` one."""
    replicas = list(range(job.replicas))
    if other is not None and rng.random() < 0.85:
        taken = {r.replica for r in other.ranks}
        replicas = [r for r in replicas if r not in taken] or replicas
    rank = RankId(rng.choice(replicas), rng.randrange(job.ranks))
    fault = Fault(kind, rank, bucket=rng.randrange(job.shape.buckets), share=rng.random())
    fault.chunk = rng.randrange(job.shape.chunks * (2 * job.replicas - 2))
    if kind in EDGES:
        position = job.ring.index(rank.replica)
        fault.left = RankId(job.ring[position - 1], rank.rank)
    if kind in ("before", "in", "after") and not (kind != "before" and rng.random() < 0.5):
        able = [what for what, _, _ in job.program if kind == "before" or what not in ("bucket", "vote")]
        able += ["vote"] * (kind == "after")
        what = rng.choice(sorted(set(able)))
        fault.op = rng.choice([i for i, (w, _, _) in enumerate(job.program) if w == what])
    if kind == "in" and fault.op >= 0:  # all that it owes is passed on; or a part; or nothing
        fault.share = rng.choice((1.0, 1.0, rng.random(), 0.0))
    fault.factor = rng.uniform(2, 5) if kind == "slow_rank" else rng.uniform(4, 20)
    return fault


def _shape(rng: random.Random, replicas: int) -> Shape:
    layers, compute_s = rng.randrange(3, 9), math.exp(rng.uniform(math.log(0.15), math.log(1.5)))
    buckets, chunks = rng.randrange(1, min(layers, 3) + 1), rng.choice((1, 1, 2))
    ring_s = compute_s * rng.uniform(0.15, 0.4)  # of all buckets, while nothing is wrong
    return Shape(layers, buckets, chunks, compute_s, CHUNK * buckets * chunks * (2 * replicas - 2) / ring_s)


def case(
    seed: int,
    kind: str | None = None,
    replicas: int | None = None,
    ranks: int | None = None,
    shape: Shape | None = None,
) -> Case:
    """Return the case of a seed; the same for the same arguments.

    Args:
        seed: see the module.
        kind: one of KINDS, or "healthy"; None: drawn from KINDS.
        replicas: of the job; None: 4 to 16.
        ranks: of a replica; None: 8 to 64.
        shape: of a step; None: drawn.
    """
    rng = random.Random(seed)
    drawn = rng.choice(KINDS)
    kind = kind or drawn
    while True:
        across, inside = replicas or rng.randrange(4, 17), ranks or rng.choice((8, 12, 16, 24, 32, 48, 64))
        job = Job(rng, across, inside, shape or _shape(rng, across))
        kinds = [] if kind == "healthy" else [kind]
        if kind == "two":
            kinds = [rng.choice(HANGS + SLOW)]
            kinds.append(rng.choice(HANGS if kinds[0] in HANGS else SLOW))
        faults: list[Fault] = []
        for each in kinds:
            faults.append(_draw(rng, job, each, faults[0] if faults else None))
        if len(faults) == 2 and faults[0].ranks & faults[1].ranks:
            continue
        heard = _hang(rng, job, faults) if faults and kinds[0] in HANGS else _run(rng, job, faults)
        if heard is not None:
            stopped = bool(faults) and kinds[0] in HANGS
            return Case(seed, kind, heard, tuple(fault.ranks for fault in faults), stopped)


def _every(job: Job) -> list[RankId]:
    return [RankId(r, k) for r in range(job.replicas) for k in range(job.ranks)]


def _hang(rng: random.Random, job: Job, faults: list[Fault]) -> dict[RankId, Heard] | None:
    """Play a job until it stops; None if a fault had no chance because of the other one."""
    for _ in range(HEALTHY):
        job.step()
    begin = max(map(max, job.now))
    length = (begin - START) / HEALTHY
    moment = rng.random()  # two faults come at about the same time
    for fault in faults:
        if fault.kind in ("dead", "silent"):
            fault.at = begin + length * min(1.0, max(0.0, moment + rng.uniform(-0.1, 0.1)))
            fault.struck = True
            job.until[fault.rank] = fault.at
    job.faults = faults
    while job.step():
        pass
    if not all(fault.struck for fault in faults):
        return None
    mute = {fault.rank: fault for fault in faults if fault.kind in ("dead", "silent")}
    stopped = max(_stopped(job), *(fault.at for fault in faults if fault.at < NEVER), START)
    now = stopped + rng.uniform(2.0, 4.0)  # a lighthouse looks after two seconds
    heard = {}
    for rank in _every(job):
        told = at = now - min(rng.random() + rng.uniform(0, 0.29), now - stopped)
        if rank in mute:  # what it told while it moved may be older than the last that was heard
            fault = mute[rank]
            at = fault.at - rng.uniform(0, 1.5 if fault.kind == "dead" else 1)
            told = at if fault.kind == "dead" else fault.at - rng.uniform(0, 10)
        seen = min(told, at)
        heard[rank] = Heard(job.trace(rank, seen, rng), now - at, max(0.0, seen - job.changed(rank, seen)))
    return heard


def _stopped(job: Job) -> float:
    """Return when the last thing happened."""
    groups = [*job.whole, *(g for cuts in job.parts for cut in cuts for g in cut), job.commit]
    newest = -2 * job.shape.layers
    rows = [row for g in groups for row in g.joins[newest:] + g.dones[newest:]]
    for ring in job.rings:
        rows += [row for e in ring[-job.shape.buckets :] for row in (e.enter, *e.taken, e.end)]
    return max(t for row in rows for t in row if t < NEVER)


def _run(rng: random.Random, job: Job, faults: list[Fault]) -> dict[RankId, Heard]:
    """Play a job that goes on, with what is slow in it for some time; or one that waits between two steps."""
    for _ in range(HEALTHY):
        job.step()
    job.faults = faults
    waits = not faults and rng.random() < 0.5
    steps = rng.randrange(20, 31) if job.replicas * job.ranks <= LARGE else 4
    for _ in range(0 if waits else steps):
        before = max(map(max, job.now))
        job.step(slow=True)
    end = max(map(max, job.now))
    if waits:
        now = end + rng.uniform(1.5, 60)
        ages = {rank: min(rng.random() + rng.uniform(0, 0.29), now - end) for rank in _every(job)}
        return {
            rank: Heard(job.trace(rank, now - age, None, "waits for a grant"), age, now - age - end)
            for rank, age in ages.items()
        }
    now = end - rng.random() * (end - before)
    heard = {}
    all_told = now - rng.uniform(0, min(10, now - START))  # hosts tell at about the same times
    for rank in _every(job):
        tick = rng.random() + rng.uniform(0, 0.29)
        told = min(now, all_told + rng.random())
        t = now - tick
        while t > told and end - before > 1:
            if t - job.changed(rank, t) > 1:  # it stands still, and has told so
                told = t
            t -= 1
        heard[rank] = Heard(job.trace(rank, told, rng), tick)
    return heard
