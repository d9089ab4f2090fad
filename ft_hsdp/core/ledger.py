"""Ledger: which batches of each data shard are inside a state.

The ledger is part of the replicated state, so it is fetched, hashed and checkpointed with the weights. That
is what makes every batch count exactly once (FT-HSDP §5): a replica that was left behind takes its position
in its data from the state that it fetches, which may already hold its last batch.

Dealer: which batch each replica takes next. A function of the committed state alone.

Whoever holds a state knows all hands, so a batch is fed before it is known who takes part in the step, and no
two replicas ever feed the same one (FT-HSDP §5 gives each replica a loader of its own and repeats batches).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

MAX_HOLES = 65536


@dataclass(frozen=True, slots=True)
class Ledger:
    """What was trained: of data shard ``s`` all batches below ``cursors[s]``, but those in ``holes``.

    ``holes`` are (shard, index), sorted: batches that are dealt again before any new one. ``takers`` are the
    contributors of the step that led here, sorted: the next batches are dealt to them first (core/deal.py).
    ``spoilt`` are (shard, index, times), sorted: batches that were left out so many times because their gradient
    was not finite. One that is given up for that counts as spent, like those that were trained.

    Raises:
        ValueError: no ledger that training can lead to looks like this.
    """

    cursors: tuple[int, ...]
    holes: tuple[tuple[int, int], ...] = ()
    takers: tuple[int, ...] = ()
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
        """A ledger of ``shards`` data shards of which nothing was trained."""
        return Ledger((0,) * shards)

    def untrained(self, shard: int, place: int) -> int:
        """The index of the batch of ``shard`` at ``place`` (from 0) among those not trained: holes come first."""
        holes = [index for s, index in self.holes if s == shard]
        return holes[place] if place < len(holes) else self.cursors[shard] + place - len(holes)

    def given_up(self, spoiled: Iterable[tuple[int, int]], retries: int) -> tuple[tuple[int, int], ...]:
        """Those of ``spoiled``, left out of one more step, that have been left out ``retries`` times by then."""
        times = {(shard, index): n for shard, index, n in self.spoilt}
        return tuple(sorted(batch for batch in set(spoiled) if times.get(batch, 0) + 1 >= retries))

    def advance(
        self,
        batches: Iterable[tuple[int, int]],
        takers: tuple[int, ...] = (),
        spoiled: Iterable[tuple[int, int]] = (),
        retries: int = 1,
    ) -> Ledger:
        """The ledger after a step in which ``takers`` trained ``batches`` = (shard, index).

        An index from the cursor on leaves holes for what it jumps over. ``spoiled`` batches were left out of the
        step because their gradients were not finite; one that was left out ``retries`` times is given up.

        Raises:
            ValueError: a batch was trained before, or there would be more than MAX_HOLES holes.
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
        """The same batches as a ledger of ``shards`` data shards, for a resume on other replicas.

        Batch ``index`` of ``s`` old shards' ``shard`` is batch ``index * s + shard`` of the whole data, and stays
        trained or not trained under its new name. How often one was left out is forgotten.

        Raises:
            ValueError: there would be more than MAX_HOLES holes.
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
    """How many of the first ``end`` batches of the whole data are ``shard``'s, of ``shards``."""
    return max(0, -(-(end - shard) // shards))


Assignment = Literal["per_replica", "global"]
Batch = tuple[int, int]  # (data shard, index)


@dataclass(frozen=True, slots=True)
class BatchAssigner:
    """``per_replica``: replica r takes the batches of data shard r, one after the other.

    ``global``: all take from one data shard; the contributors of the last step come first, in the order of their
    ids, then all others. While the same replicas contribute no batch is left out; what one that is lost had in
    its hand is dealt again in the next step.
    """

    assignment: Assignment
    replicas: int

    @property
    def shards(self) -> int:
        """Data shards of the job."""
        return self.replicas if self.assignment == "per_replica" else 1

    def begin(self) -> Ledger:
        """The ledger before the first step."""
        return Ledger.empty(self.shards)

    def assign(self, ledger: Ledger, me: int) -> Batch:
        """The batch that replica ``me`` feeds on top of the state with ``ledger``."""
        if self.assignment == "per_replica":
            return me, ledger.untrained(me, 0)
        return 0, ledger.untrained(0, _place(ledger.takers, me))

    def predict(self, ledger: Ledger, me: int) -> Batch:
        """The batch that ``me`` will feed after this step, if the contributors stay the same: a guess."""
        takers = tuple(sorted({*(ledger.takers or range(self.replicas)), me}))
        after = ledger.advance([self.assign(ledger, r) for r in takers], takers)
        return self.assign(after, me)


def _place(takers: tuple[int, ...], me: int) -> int:
    """The place of ``me`` in the order of dealing: no two replicas have the same."""
    if me in takers:
        return takers.index(me)
    return len(takers) + me - sum(r < me for r in takers)
