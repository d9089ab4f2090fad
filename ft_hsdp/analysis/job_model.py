"""A whole job as a model: failures come, replicas stand still, are away and join again, states are lost.

`simulate` goes from event to event. Between two of them steps pass at their usual pace, and each is worth the
share of the replicas that contribute. A `System` says how long each phase of a recovery takes and who waits;
the systems of the papers are settings of it. A `Hazard` says when failures come and what they take. The seconds of
all causes and those that trained add up to the wall time. The same seed gives the same result.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from statistics import fmean, median
from typing import Literal

from ft_hsdp.analysis.costs import Reading
from ft_hsdp.core.randomness import mix64, stream

Scope = Literal["process", "host", "rack", "zone"]
SCOPES: tuple[Scope, ...] = ("process", "host", "rack", "zone")
STEP = 1e-9  # parts of a step that are nothing but rounding


Samples = tuple[float, ...]
"""Seconds that something takes: any of these."""

Phases = Mapping[str, Samples]
"""What follows one another, by name. Names of phases in which all stand still are causes of lost time."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Where states outlive a failure."""

    every: int = 1  # steps between two of them
    write_s: float = 0.0  # from the end of its step until a state can be read
    wait_s: float = 0.0  # for which training waits for each


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How a job recovers."""

    replicas: int = 1  # that go on without each other
    step_s: Samples = (1.0,)  # the mean is the pace, the median what a step is worth
    stall: Phases = field(default_factory=dict)  # the others stand still after a loss
    silent: Phases = field(default_factory=dict)  # the same if a host is gone: no connection tells; {}: `stall`
    again: bool = False  # whether they train the step again that was hit
    back: Phases = field(default_factory=dict)  # the lost replica is away, from its loss on
    swap: Phases = field(default_factory=dict)  # the same while there is a spare
    join: Phases = field(default_factory=dict)  # all stand still while it joins
    restart: Phases = field(default_factory=dict)  # all stand still if no replica is left, and start again
    replace_s: Samples = (0.0,)  # until there is another host, or another spare
    spares: int = 0  # replicas that can be replaced at once
    narrow: float = 0.0  # part of its work that a replica does without its lost host; 0: it waits for another
    patience_s: float = 0.0  # for which it waits before that
    kept: frozenset[str] = frozenset()  # scopes whose failures leave the last replica's state in memory
    memory: Tier = Tier()
    disk: Tier = Tier(100)
    per_rack: int = 1  # replicas with hosts in one rack
    per_zone: int = 1


@dataclass(frozen=True, slots=True)
class Hit:
    """A failure at a known time, of one replica or of a random one."""

    t: float
    replica: int | None = None
    scope: Scope = "process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """When failures come, at random, and what each takes."""

    every_s: float = math.inf  # mean time between two of the whole job
    reading: Reading = "wall_clock"  # of `every_s`, as in `costs.effective_ratio`
    mix: Mapping[str, float] = field(default_factory=lambda: {"process": 1.0})  # weight of each scope
    hits: tuple[Hit, ...] = ()  # these failures alone, by time


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the time."""

    wall_s: float
    useful_s: float  # each step once
    lost_s: Mapping[str, float]  # by cause; with `useful_s` it is `wall_s`
    failures: int
    fallbacks: int  # of the whole job to the disk

    @property
    def with_replay(self) -> float:
        """Return the effective training time as a ratio: a step that is done twice counts once."""
        return self.useful_s / self.wall_s

    @property
    def wall_clock(self) -> float:
        """Return the same where each step counts as often as it is done."""
        return (self.useful_s + self.lost_s.get("replay", 0.0)) / self.wall_s


def simulate(system: System, hazard: Hazard, wall_s: float, seed: int = 0) -> Outcome:
    """Return what becomes of the first ``wall_s`` seconds of a job; they begin with its first step."""
    return _Job(system, hazard, seed).run(wall_s)


class _Job:
    def __init__(self, system: System, hazard: Hazard, seed: int) -> None:
        self.system, self.hazard = system, hazard
        self.usual_s, self.mean_s = median(system.step_s), fmean(system.step_s)
        self.pace_s = self.mean_s + system.disk.wait_s / system.disk.every
        self.now = self.done = self.worth = 0.0  # seconds, steps, and the sum of their shares
        self.highest = 0.0  # `done` before the newest fall-back
        self.up = [1.0] * system.replicas  # part of its work that each replica does
        self.stall: deque[tuple[str, float]] = deque()  # phases in which all stand still, and when each ends
        self.lost: defaultdict[str, float] = defaultdict(float)
        self.failures = self.fallbacks = 0
        self._spares = system.spares
        self._lives = [0] * system.replicas  # the events of earlier lives are void
        self._due: list[tuple[float, str, int, int, float]] = []  # time, what, replica, life, width
        self._past = [(0.0, 0.0, 0.0)]  # now, done and worth after each event; all of them only grow
        self._random = {use: stream(seed, "model", use) for use in ("failures", "phases")}
        self._hits = iter(hazard.hits)
        self._hit: Hit | None = None  # the next failure
        self._failed = 0.0  # when the last one was

    def run(self, wall_s: float) -> Outcome:
        while True:
            self._hit = self._hit or self._next()
            due = self._due[0][0] if self._due else math.inf
            fails = self._hit.t if self._hit else math.inf
            self._advance(max(self.now, min(wall_s, due, fails)))
            if self.now >= wall_s:
                lost = {cause: seconds for cause, seconds in self.lost.items() if seconds}
                return Outcome(wall_s, self.worth * self.usual_s, lost, self.failures, self.fallbacks)
            if self._hit is None or due <= fails:
                self._happens(*heappop(self._due)[1:])
            else:
                self._fail(self._hit)
                self._failed, self._hit = self.now, None

    def _part(self, use: str) -> float:
        """Return a random number between 0 and 1, without both. Failures do not depend on how long phases last."""
        self._random[use] += 0x9E3779B97F4A7C15
        return ((mix64(self._random[use] % 2**64) >> 12) + 0.5) / 2**52

    def _any(self, samples: Samples) -> float:
        return samples[int(self._part("phases") * len(samples))]

    def _draw(self, phases: Phases) -> list[tuple[str, float]]:
        return [(name, self._any(samples)) for name, samples in phases.items()]

    def _after(self, phases: Phases) -> float:
        return self.now + sum(seconds for _, seconds in self._draw(phases))

    def _advance(self, until: float) -> None:
        """Let time pass: what is left of the phases in which all stand still, then steps."""
        while self.stall and self.now < until:
            name, end = self.stall[0]
            self.lost[name] += min(end, until) - self.now
            self.now = min(end, until)
            if end <= until:
                self.stall.popleft()
        steps, share = max(0.0, until - self.now) / self.pace_s, sum(self.up) / len(self.up)
        self.lost["checkpoint"] += steps * (self.pace_s - self.mean_s)
        self.lost["other"] += steps * (self.mean_s - self.usual_s)
        self.lost["missing"] += steps * self.usual_s * (1 - share)
        self.done, self.worth, self.now = self.done + steps, self.worth + steps * share, until
        self._past.append((self.now, self.done, self.worth))

    def _next(self) -> Hit | None:
        """Return the next failure; None while a recovery must end before it is known when."""
        hazard, begin = self.hazard, self._failed
        if hazard.hits or hazard.every_s == math.inf:
            return next(self._hits, None)
        if hazard.reading == "renewal":
            if min(self.up) < 1:
                return None
            begin = self._still_until + max(0.0, self.highest - self.done) * self.pace_s
        weights = [*accumulate(hazard.mix.get(scope, 0.0) for scope in SCOPES)]
        scope = SCOPES[bisect_left(weights, self._part("failures") * weights[-1])]
        return Hit(begin - hazard.every_s * math.log(self._part("failures")), None, scope)

    def _fail(self, hit: Hit) -> None:
        system, replicas = self.system, self.system.replicas
        self.failures += 1
        victim = int(self._part("failures") * replicas) if hit.replica is None else hit.replica
        size = {"rack": system.per_rack, "zone": system.per_zone}.get(hit.scope, 1)
        first = victim // size * size
        victims = range(first, min(replicas, first + size))
        noticed = any(self.up[first : first + size])
        for each in victims:
            self.up[each] = 0.0
            self._lives[each] += 1
        if not any(self.up):
            self._restart(hit.scope)
            return
        for each in victims:
            self._return(each, hit.scope)
        if noticed:
            if system.again:
                self._fall_back(Tier())
            silent = hit.scope != "process" and system.silent
            self._stand_still(self._draw(silent or system.stall))

    def _return(self, replica: int, scope: Scope) -> None:
        """Have a lost replica come back."""
        system = self.system
        if self._takes_spare():
            self._push(self._after(system.swap), "join", replica)
            return
        wait = 0.0 if scope == "process" else self._any(system.replace_s)
        there = self._after(system.back)
        if system.narrow and wait > system.patience_s:
            there += system.patience_s
            self._push(there, "join", replica, system.narrow)
            self._push(max(there, self.now + wait), "widen", replica)
        else:
            self._push(there + wait, "join", replica)

    def _takes_spare(self) -> bool:
        if self._spares:
            self._spares -= 1
            self._push(self.now + self._any(self.system.replace_s), "spare")
            return True
        return False

    def _push(self, t: float, what: str, replica: int = 0, width: float = 1.0) -> None:
        heappush(self._due, (t, what, replica, self._lives[replica], width))

    def _happens(self, what: str, replica: int, life: int, width: float) -> None:
        if what == "spare":
            self._spares += 1
        elif life != self._lives[replica]:
            pass
        elif what == "join":
            self.up[replica] = width
            self._stand_still(self._draw(self.system.join))
        else:
            self.up[replica] = 0.0
            self._push(self._after(self.system.back), "join", replica)

    def _restart(self, scope: Scope) -> None:
        """Have all replicas start again together, from memory or from the disk."""
        system, kept = self.system, scope in self.system.kept
        self.fallbacks += not kept
        self._fall_back(system.memory if kept else system.disk)
        phases = self._draw(system.restart)
        if scope != "process" and not self._takes_spare():
            phases.insert(0, ("replace", self._any(system.replace_s)))
        self._stand_still(phases)
        self.up = [1.0] * system.replicas
        self._lives = [life + 1 for life in self._lives]

    def _stand_still(self, phases: Sequence[tuple[str, float]]) -> None:
        """Have all stand still for these phases; what began before and ends earlier is done again."""
        ends = [*accumulate((seconds for _, seconds in phases), initial=self.now)]
        if ends[-1] > self._still_until:
            self.stall = deque(zip((name for name, _ in phases), ends[1:], strict=True))

    @property
    def _still_until(self) -> float:
        return self.stall[-1][1] if self.stall else self.now

    def _fall_back(self, tier: Tier) -> None:
        """Go back to the newest state of a tier; what it does not have is trained again."""
        self.highest = max(self.highest, self.done)
        past, limit = self._past, self.now - tier.write_s
        at = bisect_right(past, limit, key=lambda each: each[0])
        reached = _between(past[at - 1], past[at], 0, limit)[1] if at < len(past) else self.done
        saved = float(math.floor(reached / tier.every + STEP) * tier.every)
        if saved >= self.done:
            return
        at = max(1, bisect_left(past, saved, key=lambda each: each[1]))
        _, _, worth = point = _between(past[at - 1], past[at], 1, saved)
        self.lost["replay"] += (self.worth - worth) * self.usual_s
        self.done, self.worth = saved, worth
        del past[at:]
        past += [point, (self.now, self.done, worth)]


Point = tuple[float, float, float]


def _between(a: Point, b: Point, by: int, value: float) -> Point:
    """Return the point between two where the coordinate ``by`` has this value."""
    part = (value - a[by]) / (b[by] - a[by]) if b[by] > a[by] else 0.0
    return a[0] + part * (b[0] - a[0]), a[1] + part * (b[1] - a[1]), a[2] + part * (b[2] - a[2])
