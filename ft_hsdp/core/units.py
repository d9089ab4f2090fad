"""Units: how much each contributor trains in a step, and which units of the data it takes.

A unit is one data rank's micro-batch. A data rank is one rank, or with tensor parallelism `ranks_per_unit` ranks
that follow each other: they train one micro-batch together. With A micro-batches per step and D data ranks per
replica, batch b of a data shard has the units b*A*D to (b+1)*A*D - 1; unit u is micro-batch (u // D) % A of data
rank u % D of batch u // (A*D). A contributor trains m micro-batches on each of its data ranks, so it takes m*D
units.

Two pure steps lead from a membership to units. `shares` says how many units each contributor takes. `deal` says
which *places* it takes: place p is the p-th untrained unit of the state that the step builds on, so a place needs
no knowledge of the data, and the lighthouse can deal places. `Ledger.at` turns places into units.

A replica that goes on with fewer ranks, W data ranks instead of D, trains m*W units in the same time. Units keep
their numbers, so a micro-batch of it is any W units that follow each other among its places, one for each rank.

A batch is started before the grant of its step is known. Therefore a contributor that stays keeps the places that
it was dealt before on the same state, and the units of a lost one are free again: `redeal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

BatchRule = Literal["adapt", "constant"]
RefillRule = Literal["next_step", "same_step"]
Places = tuple[tuple[int, int], ...]  # (first place, count), disjoint, in the order in which they are trained


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """How the units of a step are shared out; agreed at the first grant."""

    # Replicas that the job wants: with `accumulate` and the data ranks, the wanted units of a step.
    replicas: int = 1
    accumulate: int = 1  # micro-batches of a data rank in a step to which all replicas contribute
    # "adapt": each contributor takes `accumulate` micro-batches. "constant": the contributors share the wanted
    # number of units.
    batch: BatchRule = "adapt"
    # A contributor is lost in the middle of a step: "next_step" commits what the others hold, "same_step" has them
    # train what is missing first.
    refill: RefillRule = "next_step"
    allowed: tuple[int, ...] = ()  # permitted numbers of contributors, sorted; (): any
    max_accumulate: int = 1  # most micro-batches of a data rank in a step
    shared: bool = False  # all replicas take from one data shard; else each takes from its own
    ranks_per_unit: int = 1  # ranks that train one unit together
    data_ranks: int = 0  # of a replica with all its ranks; 0: as many as the widest member has

    def contributors(self, able: int) -> int:
        """Return how many of `able` replicas contribute: the largest allowed number, or 0 if none is allowed."""
        if not self.allowed:
            return able
        return max((n for n in self.allowed if n <= able), default=0)

    def shares(self, widths: Sequence[int]) -> tuple[int, ...]:
        """Return the units of each contributor: its micro-batches per data rank times its width.

        1. If the batch adapts, each contributor takes `accumulate` micro-batches.
        2. Otherwise each takes the same number, at least one and at most `max_accumulate`.
        3. What is missing to the constant batch goes in single micro-batches to those whose width it fits, the
        widest first: whole replicas take over from those with fewer ranks.

        No rank stays idle in a micro-batch, so some sums cannot be had. With equal widths the sum is what is
        wanted, unless `max_accumulate` caps it or there are more contributors than micro-batches. With unequal
        widths it may be less, by less than the widest trains at once; it is more only by rule 2's "at least
        one".

        Example: 3 replicas of 2 data ranks, `accumulate` 4: 24 units are wanted. Of widths 2, 2 and 1 each takes
        4 micro-batches, which are 20 units, and the wide ones take another: 10, 10 and 4.

        Args:
            widths: data ranks of each contributor, in ring order.
        """
        if self.batch == "adapt" or not widths:
            return tuple(self.accumulate * width for width in widths)
        wanted = self.replicas * self.accumulate * max(self.data_ranks, *widths)
        each = max(1, min(wanted // sum(widths), self.max_accumulate))
        missing = wanted - each * sum(widths)
        result = [each * width for width in widths]
        if each < self.max_accumulate:
            for at in sorted(range(len(widths)), key=lambda at: -widths[at]):  # of equal ones the first
                if widths[at] <= missing:
                    missing -= widths[at]
                    result[at] += widths[at]
        return tuple(result)


EACH_ITS_BATCH = UnitPolicy()


def deal(counts: Iterable[int], shared: bool) -> tuple[Places, ...]:
    """Return the places of each contributor in a step that nothing has disturbed.

    `counts` are the units of each, in ring order. If the data shard is `shared`, one takes after the other, so
    no two overlap.
    """
    places, begin = [], 0
    for count in counts:
        places.append(((begin, count),) if count else ())
        begin += count if shared else 0
    return tuple(places)


def redeal(
    before: Mapping[int, Places], counts: Mapping[int, int], shared: bool, refill: bool, dealt: int = 0
) -> tuple[dict[int, Places], int]:
    """Return the places of each contributor under a new membership on a state on which places were dealt before.

    A contributor that stays keeps its places from the first one on, because it may have trained them already. If
    its quota shrinks, the places that it gives up stay free in this step: it may have trained them, too. What a
    lost contributor had, and what lies behind all places, goes to those that need more.

    Args:
        before: the places of each contributor of the membership before.
        counts: units of each contributor of the new one; the order is that in which places are dealt.
        shared: whether all take from one data shard.
        refill: whether contributors that stay get more places now, rather than in the next step.
        dealt: places that were ever dealt on this state; those beyond the places in `before` are not free.

    Returns:
        The places of each contributor, and the number of places that were ever dealt on this state.
    """
    if not shared:
        stay = {r: min(n, size(before[r])) if r in before and not refill else n for r, n in counts.items()}
        return {r: ((0, n),) if n else () for r, n in stay.items()}, 0
    end = max([dealt, *(first + count for places in before.values() for first, count in places)])
    free = sorted(run for r, places in before.items() if r not in counts for run in places)
    result: dict[int, Places] = {}
    for replica, count in counts.items():
        kept = head(before.get(replica, ()), count)
        result[replica] = kept
    for replica, count in counts.items():
        missing = count - size(result[replica])
        if missing and (refill or replica not in before):
            taken, free = _take(free, missing)
            more = missing - size(taken)
            taken = (*taken, (end, more)) if more else taken
            end += more
            result[replica] = joined((*result[replica], *taken))
    return result, end


def size(places: Iterable[tuple[int, int]]) -> int:
    """Return the number of places."""
    return sum(count for _, count in places)


def head(places: Places, count: int) -> Places:
    """Return the first `count` of `places`, or all of them if there are fewer."""
    taken, _ = _take(places, count)
    return taken


def joined(places: Iterable[tuple[int, int]]) -> Places:
    """Return the same places in the same order, with neighbours joined."""
    result: list[tuple[int, int]] = []
    for first, count in places:
        if result and sum(result[-1]) == first:
            result[-1] = (result[-1][0], result[-1][1] + count)
        elif count:
            result.append((first, count))
    return tuple(result)


def _take(places: Sequence[tuple[int, int]], count: int) -> tuple[Places, list[tuple[int, int]]]:
    """Return the first `count` of `places`, and the rest."""
    taken: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for first, length in places:
        now = min(length, count)
        count -= now
        if now:
            taken.append((first, now))
        if now < length:
            rest.append((first + now, length - now))
    return tuple(taken), rest
