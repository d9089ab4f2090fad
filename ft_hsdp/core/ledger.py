"""Which units of each data shard are inside a state, and which units a contributor takes next.

The `Ledger` is part of the replicated state: it is fetched, hashed and checkpointed with the weights. Therefore
every unit counts exactly once (FT-HSDP §5): a replica that was left behind takes its position in the data from the
state that it fetches, which may already contain its last batch. (FT-HSDP §5 gives each replica a data loader of
its own, and repeats batches.)

Units are stored as runs of numbers. `core.units` says what a unit is, and deals the places that `Ledger.at` turns
into units.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

MAX_HOLES = 65536  # bounds the size of a ledger, which travels and is stored
MAX_UNIT = 2**62  # bounds unit numbers

Run = tuple[int, int, int]  # (data shard, first unit, count)
Spoiled = tuple[int, int, int, int]  # (data shard, first unit, count, times)


@dataclass(frozen=True, slots=True)
class Ledger:
    """What was trained: of data shard `s` all units below `cursors[s]` except those in `holes`.

    All fields are hashed and stored, so they keep their names.

    Raises:
        ValueError: training cannot lead to such a ledger.
    """

    cursors: tuple[int, ...]  # for each data shard, one more than its highest unit that was trained
    holes: tuple[Run, ...] = ()  # units below the cursors that were not trained, sorted; they are taken first
    # Sorted: units left out so many times because their gradients were not finite.
    spoilt: tuple[Spoiled, ...] = ()

    def __post_init__(self) -> None:
        if any(not 0 <= cursor <= MAX_UNIT for cursor in self.cursors):
            raise ValueError(f"cursors {list(self.cursors)}: each must be from 0 to {MAX_UNIT}")
        if max(len(self.holes), len(self.spoilt)) > MAX_HOLES:
            most = max(len(self.holes), len(self.spoilt))
            raise ValueError(f"{most} runs of units were left out; at most {MAX_HOLES} are kept")
        for what, runs in (("holes", self.holes), ("spoilt units", self.spoilt)):
            for shard, first, count, *times in runs:
                if not 0 <= shard < len(self.cursors) or first < 0 or count < 1 or any(n < 1 for n in times):
                    raise ValueError(f"{what}: {count} units from {first} of data shard {shard} cannot be")
            if any(a[0] == b[0] and a[1] + a[2] > b[1] for a, b in pairwise(runs)) or list(runs) != sorted(runs):
                raise ValueError(f"{what} are not sorted, or overlap")
        if any(a[0] == b[0] and a[1] + a[2] == b[1] for a, b in pairwise(self.holes)):
            raise ValueError("holes that touch each other are one hole")
        for shard, first, count in self.holes:
            if first + count >= self.cursors[shard]:
                raise ValueError(f"hole at {first} of data shard {shard} is not below its last trained unit")

    @staticmethod
    def empty(shards: int) -> Ledger:
        """Return the ledger of `shards` data shards of which nothing was trained."""
        return Ledger((0,) * shards)

    def at(self, shard: int, places: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
        """Return the units at some places among the untrained units of a data `shard`, in the order of the places.

        Runs that follow each other are joined. `places` are (first place, count); place 0 is the first untrained
        unit: holes come first, then the units from the cursor on.
        """
        holes = [(first, count) for s, first, count in self.holes if s == shard]
        below = sum(count for _, count in holes)
        result: list[Run] = []
        for begin, count in places:
            end, place = begin + count, 0
            for first, length in holes:
                low, high = max(begin, place), min(end, place + length)
                if low < high:
                    result.append((shard, first + low - place, high - low))
                place += length
            if end > below:
                low = max(begin, below)
                result.append((shard, self.cursors[shard] + low - below, end - low))
        return tuple(_joined(result))

    def given_up(self, spoiled: Iterable[Run], retries: int) -> tuple[Run, ...]:
        """Return the units that reach the limit of `retries` when `spoiled` are left out of one more step."""
        over = [run for run in _added(self.spoilt, spoiled) if run[3] >= retries]
        return tuple(_common([run[:3] for run in over], spoiled))

    def advance(self, runs: Iterable[Run], spoiled: Iterable[Run] = (), retries: int = 1) -> Ledger:
        """Return the ledger after a step.

        Units between the cursor and a unit that was trained become holes. Units that are given up count as
        spent, like those that were trained.

        Args:
            runs: units that were trained.
            spoiled: units that the step went without because their gradients were not finite.
            retries: a spoiled unit that was left out of so many steps is given up.

        Raises:
            ValueError: a unit was trained before, or there would be more than `MAX_HOLES` holes.
        """
        spoiled = sorted(spoiled)
        spent = sorted([*runs, *self.given_up(spoiled, retries)])
        cursors = list(self.cursors)
        holes: dict[int, list[tuple[int, int]]] = {}  # by data shard: (first, end), sorted
        for shard, first, count in self.holes:
            holes.setdefault(shard, []).append((first, first + count))
        for shard, first, count in spent:
            end, mine = first + count, holes.setdefault(shard, [])
            if not 0 <= shard < len(cursors) or count < 1 or first < 0 or end > MAX_UNIT:
                raise ValueError(f"{count} units from {first} of data shard {shard} cannot be")
            if first >= cursors[shard]:
                if first > cursors[shard]:
                    mine.append((cursors[shard], first))
                cursors[shard] = end
                continue
            at = bisect_right(mine, first, key=itemgetter(0)) - 1
            if at < 0 or end > mine[at][1]:
                raise ValueError(f"a unit of {first} to {end - 1} of data shard {shard} was trained before")
            low, high = mine[at]
            mine[at : at + 1] = [part for part in ((low, first), (end, high)) if part[0] < part[1]]
        left = tuple((s, a, b - a) for s in sorted(holes) for a, b in holes[s])
        return Ledger(tuple(cursors), left, _without(_added(self.spoilt, spoiled), spent))

    def rescaled(self, batch: tuple[int, int], other: tuple[int, int]) -> Ledger:
        """Return the same batches as a ledger of batches of another shape, for a resume on other ranks.

        A unit of the one has other data than a unit of the other, so only whole batches can be taken over.

        Args:
            batch: micro-batches of a rank, and ranks, of a batch in this ledger.
            other: the same of a batch in the result.

        Returns:
            A new ledger. How often a unit was left out is forgotten.

        Raises:
            ValueError: a batch was trained in part.
        """
        if batch == other:
            return Ledger(self.cursors, self.holes)
        before, after = math.prod(batch), math.prod(other)
        for shard, unit in (*enumerate(self.cursors), *((s, n) for s, a, c in self.holes for n in (a, a + c))):
            if unit % before:
                raise ValueError(f"batch {unit // before} of data shard {shard} was trained in part")
        cursors = tuple(cursor // before * after for cursor in self.cursors)
        return Ledger(cursors, tuple((s, n // before * after, c // before * after) for s, n, c in self.holes))

    def resharded(self, shards: int, batch: int) -> Ledger:
        """Return the same units as a ledger of `shards` data shards, for a resume on another number of replicas.

        Batch `index` of `shard`, of `s` data shards, is batch `index * s + shard` of the whole data. It stays
        trained or untrained under its new name. How often a unit was left out is forgotten.

        Args:
            shards: number of data shards after.
            batch: units of a batch, before and after.

        Returns:
            A new ledger.

        Raises:
            ValueError: there would be more than `MAX_HOLES` holes.
        """
        old = len(self.cursors)
        if shards == old:
            return Ledger(self.cursors, self.holes)
        # Batches of the whole data up to the last one of which a unit was trained.
        end = max(
            ((cursor - 1) // batch * old + s + 1 for s, cursor in enumerate(self.cursors) if cursor), default=0
        )
        lag = [(s, cursor, _count(end, old, s) * batch - cursor) for s, cursor in enumerate(self.cursors)]
        total = sum(-(-count // batch) for _, _, count in (*self.holes, *lag) if count > 0)
        if total > MAX_HOLES:
            raise ValueError(f"{total} batches were left out; at most {MAX_HOLES} are kept")
        cursors = [_count(end, shards, s) * batch for s in range(shards)]
        left: list[Run] = []
        for s, first, count in (*self.holes, *(run for run in lag if run[2] > 0)):
            for index in range(first // batch, (first + count - 1) // batch + 1):
                low, high = max(first, index * batch), min(first + count, (index + 1) * batch)
                number = index * old + s
                left.append((number % shards, number // shards * batch + low - index * batch, high - low))
        holes: list[Run] = []
        for s, first, count in reversed(_united(left)):
            if first + count == cursors[s]:
                cursors[s] = first
            else:
                holes.append((s, first, count))
        return Ledger(tuple(cursors), tuple(reversed(holes)))


def _count(end: int, shards: int, shard: int) -> int:
    """Return how many of the first `end` batches of the whole data belong to `shard`, of `shards`."""
    return max(0, -(-(end - shard) // shards))


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Return the same runs in the same order, with those joined that follow each other."""
    result: list[Run] = []
    for shard, first, count in runs:
        if result and result[-1][0] == shard and sum(result[-1][1:]) == first:
            result[-1] = (shard, result[-1][1], result[-1][2] + count)
        else:
            result.append((shard, first, count))
    return result


def overlaps(a: Iterable[Run], b: Iterable[Run]) -> bool:
    """Whether two sets of runs have a unit in common.

    Args:
        a: runs of units, in any order.
        b: runs of units, in any order.

    Returns:
        True if one unit is in both.
    """
    return bool(_common(a, b))


def _common(a: Iterable[Run], b: Iterable[Run]) -> list[Run]:
    """Return the units that are in both, sorted. The cost is linear in the runs, but for sorting them."""
    left, right, both = _united(a), _united(b), list[Run]()
    i = j = 0
    while i < len(left) and j < len(right):
        (shard, first, count), (other, start, length) = left[i], right[j]
        low, high = max(first, start), min(first + count, start + length)
        if shard == other and low < high:
            both.append((shard, low, high - low))
        if (shard, first + count) < (other, start + length):
            i += 1
        else:
            j += 1
    return both


def _united(runs: Iterable[Run]) -> list[Run]:
    """Return the units of all runs, as runs that are sorted and do not overlap."""
    result: list[Run] = []
    for shard, first, count in sorted(runs):
        if result and result[-1][0] == shard and first <= sum(result[-1][1:]):
            begin, end = result[-1][1], max(sum(result[-1][1:]), first + count)
            result[-1] = (shard, begin, end - begin)
        else:
            result.append((shard, first, count))
    return result


def _added(counts: Iterable[Spoiled], runs: Iterable[Run]) -> list[Spoiled]:
    """Return how often each unit was left out when `runs` are left out once more; sorted."""
    changes: dict[tuple[int, int], int] = {}  # (data shard, unit): how the number changes there
    for shard, first, count, times in (*counts, *((*run, 1) for run in runs)):
        changes[shard, first] = changes.get((shard, first), 0) + times
        changes[shard, first + count] = changes.get((shard, first + count), 0) - times
    result: list[Spoiled] = []
    times, since = 0, 0
    for (shard, unit), change in sorted(changes.items()):
        if change == 0:
            continue
        if times:
            result.append((shard, since, unit - since, times))
        times, since = times + change, unit
    return result


def _without(counts: Iterable[Spoiled], runs: Iterable[Run]) -> tuple[Spoiled, ...]:
    """Return `counts`, which are sorted, without the units of `runs`; sorted."""
    gone = _united(runs)
    result: list[Spoiled] = []
    at = 0
    for shard, first, count, times in counts:
        begin, end = first, first + count
        while at < len(gone) and (gone[at][0], sum(gone[at][1:])) <= (shard, begin):
            at += 1
        each = at  # a run may reach into the units that come next
        while each < len(gone) and gone[each][0] == shard and gone[each][1] < end:
            if gone[each][1] > begin:
                result.append((shard, begin, gone[each][1] - begin, times))
            begin = max(begin, sum(gone[each][1:]))
            each += 1
        if begin < end:
            result.append((shard, begin, end - begin, times))
    return tuple(result)
