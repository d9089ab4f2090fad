"""When the members of a ring take and send the chunks of an all-reduce, by recursion. Lists go by position."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache

Times = list[float]  # of each member; infinity: never

NEVER = math.inf
SLOTS = 4  # chunks of an edge on their way at once


@cache
def plan(members: int, rounds: int) -> tuple[int, ...]:
    """Return for each chunk that a member sends in an all-reduce, in order, which received one lets it go.

    -1: none, it is sent at the start. The order is the same at all members, because edges keep it.
    """
    order = [(0, c) for c in range(min(SLOTS, rounds))]
    after = [-1] * len(order)
    for i in range(rounds * (2 * members - 2)):
        number, chunk = order[i]
        if number + 1 < 2 * members - 2:
            order.append((number + 1, chunk))
            after.append(i)
        if number == 0 and chunk + SLOTS < rounds:
            order.append((0, chunk + SLOTS))
            after.append(i)
    return tuple(after)


@dataclass
class Exchange:
    """One all-reduce. What never happens has the time infinity."""

    enter: Times
    hops: Times  # seconds of a chunk on the edge from the left
    works: Times  # seconds to add a chunk
    rounds: int
    until: dict[int, float]  # when a member dies or stops
    stops: dict[int, int]  # chunks that a member takes before its engine hangs
    lost: dict[int, int]  # number of the chunk from the left that never arrives
    struck: dict[int, float] = field(default_factory=dict)  # when one of these two took effect, by position
    taken: list[Times] = field(default_factory=list)  # of each chunk from the left
    last: Times = field(default_factory=list)  # of these the newest
    end: Times = field(default_factory=list)

    def run(self) -> Exchange:
        now, arrived = self.enter, [0.0] * len(self.enter)
        for number, cause in enumerate(plan(len(self.enter), self.rounds)):
            leaves = self.enter if cause < 0 else self.taken[cause]
            if number >= SLOTS:
                room = self.taken[number - SLOTS]
                leaves = [a if a > b else b for a, b in zip(leaves, room[1:] + room[:1], strict=True)]
            before = leaves[-1:] + leaves[:-1]
            arrived = [(a if a > b else b) + h for a, b, h in zip(arrived, before, self.hops, strict=True)]
            for position, chunk in self.lost.items():
                if chunk == number and arrived[position] < NEVER:
                    self.struck[position] = arrived[position]
                    arrived[position] = NEVER
            now = [(a if a > b else b) + w for a, b, w in zip(arrived, now, self.works, strict=True)]
            for position, chunk in self.stops.items():
                if chunk == number and now[position] < NEVER:
                    self.struck[position] = now[position]
                    now[position] = NEVER
            for position, t in self.until.items():
                if now[position] > t:
                    now[position] = NEVER
            self.taken.append(now)
        self.end = list(map(max, now, now[1:] + now[:1]))
        for position, t in self.until.items():
            if self.end[position] > t:
                self.end[position] = NEVER
        self.last = now
        return self

    def forget(self) -> None:
        """Free the memory of an all-reduce that has ended; who asks for its counts makes it run again."""
        if max(self.end) < NEVER:
            self.taken = []

    def spent(self, position: int, t: float) -> tuple[float, float]:
        """Return the seconds inside, and of these waiting for the right, until `t`."""
        start, last = self.enter[position], self.last[position]
        inside = min(self.end[position], t) - start
        return inside, max(0.0, min(self.end[position], t) - last)

    def awaits(self, position: int, t: float) -> str:
        """Return for which neighbour the engine of a member waits at `t`; "": for none, it hangs."""
        if position in self.stops and position in self.struck:
            return ""
        return "right" if self.last[position] <= t else "left"

    def counts(self, position: int, t: float) -> tuple[int, int, float]:
        """Return how many chunks a member has taken and sent until `t`, and when it took the newest."""
        if not self.taken:
            self.run()
        took = bisect_right(self.taken, t, key=lambda row: row[position])
        sent = bisect_right(plan(len(self.enter), self.rounds), took - 1)
        return took, sent, self.taken[took - 1][position] if took else self.enter[position]
