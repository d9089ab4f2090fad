"""Commit: the record of a step, the token that decides it, and the tally of a replica's own votes.

FT-HSDP §4.1 lets each replica decide for itself whether a step succeeded, so replicas may differ. Here the
leaders pass a token round their ring twice: pass 1 ANDs the votes, pass 2 carries the verdict. Votes and
tokens are fenced by (epoch, step, attempt), so a late one can never be counted for another step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ft_hsdp.core import lineage
from ft_hsdp.core.cursor import Ledger
from ft_hsdp.core.lineage import StateId

LrScale = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Fence:
    """What a vote or token is about. Anything about another attempt is not counted."""

    epoch: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one replica put into a step: its weight, its batch, and its mean loss (for the metrics only)."""

    replica: int
    weight: int
    shard: int
    index: int
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """All that is needed to apply a step the same way everywhere, and to replay it later.

    ``ring`` is the order of addition, ``chunk_bytes`` the chunk plan, ``digest`` the rank-ordered hash of the
    reduced shards, ``norm`` the norm of the reduced gradient summed in rank order, ``prev`` the lineage
    before.
    """

    epoch: int
    attempt: int
    step: int
    prev: str
    ring: tuple[int, ...]
    total: int
    contributions: tuple[Contribution, ...]
    digest: str
    norm: float = 0.0
    lr_scale: float = 1.0
    chunk_bytes: int = 0
    poisoned: tuple[int, ...] = ()

    @property
    def state_id(self) -> StateId:
        """The state that applying this record to its predecessor leads to."""
        batches = [(c.replica, c.weight, c.shard, c.index) for c in self.contributions]
        after = lineage.advance(self.prev, self.epoch, self.attempt, self.step, batches, self.digest)
        return StateId(self.epoch, self.step, after)

    @property
    def fence(self) -> Fence:
        """The attempt that this is the record of."""
        return Fence(self.epoch, self.step, self.attempt)

    @property
    def contributors(self) -> tuple[int, ...]:
        """The replicas whose gradients are in the sum, sorted."""
        return tuple(sorted(c.replica for c in self.contributions))

    @property
    def divisor(self) -> int:
        """What the sum is divided by: the contributors' weights, never the size of the ring."""
        return sum(c.weight for c in self.contributions)

    @property
    def loss(self) -> float:
        """The weighted mean loss over the contributors."""
        return sum(c.weight * c.loss for c in self.contributions) / self.divisor

    def ledger(self, before: Ledger) -> Ledger:
        """The ledger after this step."""
        return before.advance((c.shard, c.index) for c in self.contributions)


@dataclass(frozen=True, slots=True)
class Token:
    """The commit token. ``lineage`` is the one that the first member's record leads to."""

    fence: Fence
    verdict: bool
    yes: bool
    lineage: str
    equal: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    reason: str = field(default="", compare=False)


def fenced(current: Fence, fence: Fence) -> bool:
    """Whether a vote or token about ``fence`` counts for ``current``."""
    return current == fence


def void(fence: Fence, known: tuple[Fence, ...]) -> bool:
    """Whether ``fence`` can never commit: its attempt or a later one of its step is known to have no yes."""
    return any((k.epoch, k.step) == (fence.epoch, fence.step) and k.attempt >= fence.attempt for k in known)


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's vote: it holds its reduced shard.

    ``digest`` is of the summed shard, ``sumsq`` its sum of squares before the division, ``contributions``
    what the headers in its ring said (with this rank's losses), ``poisoned`` whose gradient was not finite.
    """

    rank: int
    fence: Fence
    digest: str
    sumsq: float
    contributions: tuple[Contribution, ...]
    poisoned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """The votes of a replica's ranks for one fence; complete when every rank voted."""

    fence: Fence
    ranks: int
    votes: tuple[Vote, ...] = field(default=())

    def add(self, vote: Vote) -> Tally:
        """Count ``vote`` if it is about this attempt and its rank has not voted."""
        if not fenced(self.fence, vote.fence) or any(v.rank == vote.rank for v in self.votes):
            return self
        return replace(self, votes=tuple(sorted((*self.votes, vote), key=lambda v: v.rank)))

    @property
    def complete(self) -> bool:
        """Whether all ranks hold their reduced shards."""
        return len(self.votes) == self.ranks

    def record(
        self, prev: str, ring: tuple[int, ...], total: int, lr_scale: LrScale, chunk_bytes: int
    ) -> CommitRecord | None:
        """The record that the votes add up to; None if the ranks saw different contributors.

        The loss of a contributor is the mean over ranks, the norm is summed in rank order.
        """
        batches = {tuple((c.replica, c.weight, c.shard, c.index) for c in v.contributions) for v in self.votes}
        if len(batches) != 1:
            return None
        per_rank = zip(*(v.contributions for v in self.votes), strict=True)
        contributions = tuple(replace(row[0], loss=sum(c.loss for c in row) / len(row)) for row in per_rank)
        poisoned = tuple(sorted({r for v in self.votes for r in v.poisoned}))
        return CommitRecord(
            epoch=self.fence.epoch,
            attempt=self.fence.attempt,
            step=self.fence.step,
            prev=prev,
            ring=ring,
            total=total,
            contributions=contributions,
            digest=lineage.digest([v.digest for v in self.votes]),
            norm=float(sum(v.sumsq for v in self.votes)) ** 0.5 / max(1, sum(c.weight for c in contributions)),
            lr_scale=lr_scale(len(contributions), total) if contributions else 1.0,
            chunk_bytes=chunk_bytes,
            poisoned=poisoned,
        )
