"""Which batches of each data shard are inside a state, and which batch each replica takes next.

The `Ledger` is part of the replicated state: it is fetched, hashed and checkpointed with the weights. Therefore
every batch counts exactly once (FT-HSDP §5): a replica that was left behind takes its position in the data from
the state that it fetches, which may already contain its last batch.

`BatchAssigner` is a function of the committed state alone. Every replica that holds a state can compute the
batches of all, so a batch is started before it is known which replicas take part in the step, and no two replicas
ever take the same one. (FT-HSDP §5 gives each replica a data loader of its own, and repeats batches.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

MAX_HOLES = 65536  # bounds the size of a ledger, which travels and is stored


@dataclass(frozen=True, slots=True)
class Ledger:
    """What was trained: of data shard `s` all batches below `cursors[s]` except those in `holes`.

    All fields are hashed and stored, so they keep their names.

    Raises:
        ValueError: training cannot lead to such a ledger.
    """

    cursors: tuple[int, ...]  # for each data shard, one more than its highest batch that was trained
    # Batches (data shard, index) below the cursors that were not trained, sorted; they are assigned first.
    holes: tuple[tuple[int, int], ...] = ()
    takers: tuple[int, ...] = ()  # contributors of the step that led here, sorted; `BatchAssigner` puts them first
    # (data shard, index, times), sorted: batches left out so many times because their gradients were not finite.
    spoilt: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if any(cursor < 0 for cursor in self.cursors):
            raise ValueError(f"cursors {list(self.cursors)}: none may be negative")
        if len(self.holes) > MAX_HOLES:
            raise ValueError(f"{len(self.holes)} batches were left out; at most {MAX_HOLES} are kept in mind")
        if any(a >= b for a, b in zip(self.holes, self.holes[1:], strict=False)):
            raise ValueError("holes are not sorted, or one stands there twice")
        for shard, index in self.holes:
            if not (0 <= shard < len(self.cursors) and 0 <= index < self.cursors[shard] - 1):
                raise ValueError(f"hole {index} of data shard {shard} is not below its last trained batch")
        if any(a[:2] >= b[:2] for a, b in zip(self.spoilt, self.spoilt[1:], strict=False)):
            raise ValueError("spoilt batches are not sorted, or one stands there twice")
        for shard, index, times in self.spoilt:
            if not 0 <= shard < len(self.cursors) or index < 0 or times < 1:
                raise ValueError(f"batch {index} of data shard {shard} cannot have been left out {times} times")

    @staticmethod
    def empty(shards: int) -> Ledger:
        """Return the ledger of `shards` data shards of which nothing was trained."""
        return Ledger((0,) * shards)

    def untrained(self, shard: int, place: int) -> int:
        """Return the index of the batch of data shard `shard` at `place` among its untrained batches.

        Args:
            shard: number of the data shard.
            place: from 0; the holes come first, then the batches from the cursor on.

        Returns:
            The index of the batch in the data shard.
        """
        holes = [index for s, index in self.holes if s == shard]
        return holes[place] if place < len(holes) else self.cursors[shard] + place - len(holes)

    def given_up(self, spoiled: Iterable[tuple[int, int]], retries: int) -> tuple[tuple[int, int], ...]:
        """Return the batches that reach their limit when `spoiled` are left out of one more step.

        Args:
            spoiled: batches (data shard, index) that the step goes without.
            retries: a batch that was left out of so many steps is given up.

        Returns:
            (data shard, index), sorted.
        """
        times = {(shard, index): n for shard, index, n in self.spoilt}
        return tuple(sorted(batch for batch in set(spoiled) if times.get(batch, 0) + 1 >= retries))

    def advance(
        self,
        batches: Iterable[tuple[int, int]],
        takers: tuple[int, ...] = (),
        spoiled: Iterable[tuple[int, int]] = (),
        retries: int = 1,
    ) -> Ledger:
        """Return the ledger after a step.

        Batches between the cursor and an index that was trained become holes. A batch that is given up counts as
        spent, like those that were trained.

        Args:
            batches: (data shard, index) that were trained.
            takers: the contributors, sorted.
            spoiled: batches that the step went without because their gradients were not finite.
            retries: a spoiled batch that was left out of so many steps is given up.

        Returns:
            A new ledger with as many data shards.

        Raises:
            ValueError: a batch was trained before, or there would be more than `MAX_HOLES` holes.
        """
        cursors, holes = list(self.cursors), set(self.holes)
        spoiled = set(spoiled)
        spent = [*batches, *self.given_up(spoiled, retries)]
        times = {(shard, index): n for shard, index, n in self.spoilt}
        times |= {batch: times.get(batch, 0) + 1 for batch in spoiled}
        for batch in spent:
            times.pop(batch, None)
        for shard, index in spent:
            if (shard, index) in holes:
                holes.remove((shard, index))
            elif index < cursors[shard]:
                raise ValueError(f"batch {index} of data shard {shard} was trained before")
            else:
                if index - cursors[shard] + len(holes) > MAX_HOLES:
                    raise ValueError(
                        f"batch {index} of data shard {shard} is too far beyond the next one, {cursors[shard]}"
                    )
                holes.update((shard, skipped) for skipped in range(cursors[shard], index))
                cursors[shard] = index + 1
        left_out = tuple((shard, index, n) for (shard, index), n in sorted(times.items()))
        return Ledger(tuple(cursors), tuple(sorted(holes)), takers, left_out)

    def resharded(self, shards: int) -> Ledger:
        """Return the same batches as a ledger of `shards` data shards, for a resume on another number of replicas.

        Batch `index` of `shard`, of `s` data shards, is batch `index * s + shard` of the whole data. It stays
        trained or untrained under its new name. How often a batch was left out is forgotten.

        Args:
            shards: number of data shards after.

        Returns:
            A new ledger without `takers`.

        Raises:
            ValueError: there would be more than `MAX_HOLES` holes.
        """
        old = len(self.cursors)
        if shards == old:
            return replace(self, takers=())
        end = max(((cursor - 1) * old + s + 1 for s, cursor in enumerate(self.cursors) if cursor), default=0)
        lag = [range(cursor, _count(end, old, s)) for s, cursor in enumerate(self.cursors)]
        total = len(self.holes) + sum(len(indices) for indices in lag)
        if total > MAX_HOLES:
            raise ValueError(f"{total} batches were left out; at most {MAX_HOLES} are kept in mind")
        left = {index * old + s for s, index in self.holes}
        left |= {index * old + s for s, indices in enumerate(lag) for index in indices}
        cursors = [_count(end, shards, s) for s in range(shards)]
        for s in range(shards):
            while cursors[s] and (cursors[s] - 1) * shards + s in left:
                cursors[s] -= 1
        places = ((g % shards, g // shards) for g in left)
        return Ledger(tuple(cursors), tuple(sorted(p for p in places if p[1] < cursors[p[0]])))


def _count(end: int, shards: int, shard: int) -> int:
    """Return how many of the first `end` batches of the whole data belong to `shard`, of `shards`."""
    return max(0, -(-(end - shard) // shards))


Assignment = Literal["per_replica", "global"]
Batch = tuple[int, int]  # (data shard, index)


@dataclass(frozen=True, slots=True)
class BatchAssigner:
    """Which batch each replica takes next."""

    # "per_replica": replica r takes the batches of data shard r, one after the other.
    # "global": all take from one data shard, the contributors of the last step first, in the order of their ids,
    # then the others. While the same replicas contribute, no batch is left out; the batch of a lost replica is
    # assigned again in the next step.
    assignment: Assignment
    replicas: int  # replicas of the job

    @property
    def shards(self) -> int:
        """Number of data shards of the job."""
        return self.replicas if self.assignment == "per_replica" else 1

    def begin(self) -> Ledger:
        """Return the ledger before the first step."""
        return Ledger.empty(self.shards)

    def assign(self, ledger: Ledger, me: int) -> Batch:
        """Return the batch that replica `me` takes on top of the state with `ledger`.

        Args:
            ledger: of the committed state.
            me: replica id.

        Returns:
            (data shard, index). No two replicas get the same one for one ledger.
        """
        if self.assignment == "per_replica":
            return me, ledger.untrained(me, 0)
        return 0, ledger.untrained(0, _place(ledger.takers, me))

    def predict(self, ledger: Ledger, me: int) -> Batch:
        """Return the batch that replica `me` will take after this step if the contributors stay the same.

        Args:
            ledger: of the committed state.
            me: replica id.

        Returns:
            (data shard, index); a guess, good enough to prefetch it.
        """
        takers = tuple(sorted({*(ledger.takers or range(self.replicas)), me}))
        after = ledger.advance([self.assign(ledger, r) for r in takers], takers)
        return self.assign(after, me)


def _place(takers: tuple[int, ...], me: int) -> int:
    """Return the place of replica `me` in the order of assignment; no two replicas have the same."""
    if me in takers:
        return takers.index(me)
    return len(takers) + me - sum(r < me for r in takers)
