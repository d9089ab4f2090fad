"""Ledger: how many batches of each data shard are inside a state.

The ledger is part of the replicated state, so it is fetched, hashed and checkpointed with the weights. That
is what makes every batch count exactly once (FT-HSDP §5): a replica that was left behind takes its position
in its data from the state that it fetches, which may already hold its last batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ledger:
    """``cursors[shard]`` is the index of the next batch of that data shard."""

    cursors: tuple[int, ...]

    @staticmethod
    def empty(shards: int) -> Ledger:
        """A ledger of ``shards`` data shards of which nothing was trained."""
        return Ledger((0,) * shards)

    def advance(self, batches: Iterable[tuple[int, int]]) -> Ledger:
        """The ledger after a step that trained ``batches`` = (shard, index).

        Raises:
            ValueError: a batch is not the next one of its shard.
        """
        cursors = list(self.cursors)
        for shard, index in batches:
            if cursors[shard] != index:
                raise ValueError(f"batch {index} of data shard {shard} is not the next one, {cursors[shard]}")
            cursors[shard] += 1
        return Ledger(tuple(cursors))
