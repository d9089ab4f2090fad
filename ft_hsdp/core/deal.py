"""Dealer: which batch each replica takes next. A function of the committed state alone.

Whoever holds a state knows all hands, so a batch is fed before it is known who takes part in the step, and no
two replicas ever feed the same one (FT-HSDP §5 gives each replica a loader of its own and repeats batches).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ft_hsdp.core.cursor import Ledger

Assignment = Literal["per_replica", "global"]
Batch = tuple[int, int]  # (data shard, index)


@dataclass(frozen=True, slots=True)
class Dealer:
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

    def deal(self, ledger: Ledger, me: int) -> Batch:
        """The batch that replica ``me`` feeds on top of the state with ``ledger``."""
        if self.assignment == "per_replica":
            return me, ledger.untrained(me, 0)
        return 0, ledger.untrained(0, _place(ledger.takers, me))

    def foresee(self, ledger: Ledger, me: int) -> Batch:
        """The batch that ``me`` will feed after this step, if the contributors stay the same: a guess."""
        takers = tuple(sorted({*(ledger.takers or range(self.replicas)), me}))
        after = ledger.advance([self.deal(ledger, r) for r in takers], takers)
        return self.deal(after, me)


def _place(takers: tuple[int, ...], me: int) -> int:
    """The place of ``me`` in the order of dealing: no two replicas have the same."""
    if me in takers:
        return takers.index(me)
    return len(takers) + me - sum(r < me for r in takers)
