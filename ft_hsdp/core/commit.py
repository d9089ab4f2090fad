"""Commit: the record of a step, the token that decides it, and the tally of a replica's own votes.

FT-HSDP §4.1 lets each replica decide for itself whether a step succeeded, so replicas may differ. Here the
leaders pass a token round their ring twice: pass 1 ANDs the votes, pass 2 carries the verdict. Votes and
tokens are fenced by (epoch, step, attempt), so a late one can never be counted for another step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import Digests, StateId, advance, digest

LrScale = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class AttemptId:
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
    before. A record with ``poisoned`` contributors is that of a step that changes nothing but the ledger.
    ``spoiled`` are the batches (data shard, index) whose gradients were not finite in an earlier attempt of the
    step, so that it goes without them; one that is left out ``retries`` times is given up.
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
    spoiled: tuple[tuple[int, int], ...] = ()
    retries: int = 0

    @property
    def state_id(self) -> StateId:
        """The state that applying this record to its predecessor leads to."""
        batches = [(c.replica, c.weight, c.shard, c.index) for c in self.contributions]
        reduced = digest("skipped", self.digest) if self.skipped else self.digest
        if self.spoiled:
            reduced = digest("spoiled", self.spoiled, self.retries, reduced)
        after = advance(self.prev, self.epoch, self.attempt, self.step, batches, reduced)
        return StateId(self.epoch, self.step, after)

    @property
    def fence(self) -> AttemptId:
        """The attempt that this is the record of."""
        return AttemptId(self.epoch, self.step, self.attempt)

    @property
    def contributors(self) -> tuple[int, ...]:
        """The replicas whose gradients are in the sum, sorted."""
        return tuple(sorted(c.replica for c in self.contributions))

    @property
    def doubled(self) -> tuple[int, ...]:
        """The contributors that came with the batch of one with a lower id, sorted: it must not count twice."""
        lowest: dict[tuple[int, int], int] = {}
        for c in sorted(self.contributions, key=lambda c: c.replica):
            lowest.setdefault((c.shard, c.index), c.replica)
        mine = {c.replica for c in self.contributions if lowest[c.shard, c.index] != c.replica}
        return tuple(sorted(mine))

    @property
    def divisor(self) -> int:
        """What the sum is divided by: the contributors' weights, never the size of the ring."""
        return sum(c.weight for c in self.contributions)

    @property
    def skipped(self) -> bool:
        """Whether the sum is of no use: the step counts, its batches are spent, and no weight changes."""
        return bool(self.poisoned)

    @property
    def loss(self) -> float:
        """The weighted mean loss over the contributors; of a skipped step over those whose loss is finite."""
        finite = [c for c in self.contributions if math.isfinite(c.loss)] if self.skipped else self.contributions
        return sum(c.weight * c.loss for c in finite) / sum(c.weight for c in finite) if finite else math.nan

    def ledger(self, before: Ledger) -> Ledger:
        """The ledger after this step."""
        batches = ((c.shard, c.index) for c in self.contributions)
        return before.advance(batches, self.contributors, self.spoiled, self.retries)

    def given_up(self, before: Ledger) -> tuple[tuple[int, int], ...]:
        """The batches that this step spends although nobody has trained them: nothing finite came of them."""
        return before.given_up(self.spoiled, self.retries)


@dataclass(frozen=True, slots=True)
class CommitToken:
    """The commit token. ``lineage`` is the one that the first member's record leads to.

    Pass 1 gathers who holds the state that the step builds on (``equal``) and what a slice of it looks like there
    (``digests``), who is about to leave, who has dropped its log and needs a newer base (``lagging``), and who
    could not write its last checkpoint (``unwritable``), or writes one now (``writing``). ``checkpoint`` is the
    newest demand for one that somebody has heard of (0: none).
    """

    fence: AttemptId
    verdict: bool
    yes: bool
    lineage: str
    equal: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    digests: Digests = ()
    lagging: tuple[int, ...] = ()
    unwritable: tuple[int, ...] = ()
    reason: str = field(default="", compare=False)
    checkpoint: int = 0
    writing: tuple[int, ...] = ()


def fenced(current: AttemptId, fence: AttemptId) -> bool:
    """Whether a vote or token about ``fence`` counts for ``current``."""
    return current == fence


def void(fence: AttemptId, known: tuple[AttemptId, ...]) -> bool:
    """Whether ``fence`` can never commit: its attempt or a later one of its step is known to have no yes."""
    return any((k.epoch, k.step) == (fence.epoch, fence.step) and k.attempt >= fence.attempt for k in known)


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's vote: it holds its reduced shard.

    ``digest`` is of the summed shard, ``sumsq`` its sum of squares before the division, ``contributions``
    what the headers in its ring said (with this rank's losses), ``poisoned`` whose gradient was not finite.
    ``state_digest`` is of the slice of the state before that is compared at this step, "" if that is not here.
    ``kept``: the host of this rank has a whole copy of its shard of the state before.
    """

    rank: int
    fence: AttemptId
    digest: str
    sumsq: float
    contributions: tuple[Contribution, ...]
    poisoned: tuple[int, ...] = ()
    state_digest: str = ""
    kept: bool = False


@dataclass(frozen=True, slots=True)
class VoteTally:
    """The votes of a replica's ranks for one fence; complete when every rank voted."""

    fence: AttemptId
    ranks: int
    votes: tuple[Vote, ...] = field(default=())

    def add(self, vote: Vote) -> VoteTally:
        """Count ``vote`` if it is about this attempt and its rank has not voted."""
        if not fenced(self.fence, vote.fence) or any(v.rank == vote.rank for v in self.votes):
            return self
        return replace(self, votes=tuple(sorted((*self.votes, vote), key=lambda v: v.rank)))

    @property
    def complete(self) -> bool:
        """Whether all ranks hold their reduced shards."""
        return len(self.votes) == self.ranks

    @property
    def kept(self) -> bool:
        """Whether all ranks have a copy of the state before, so that older copies are of no more use."""
        return self.complete and all(v.kept for v in self.votes)

    @property
    def state_digest(self) -> str:
        """The digest of the slices of all ranks, in rank order; "" if some rank does not hold its own."""
        digests = [v.state_digest for v in self.votes]
        return digest(digests) if all(digests) else ""

    def record(
        self, prev: str, ring: tuple[int, ...], total: int, lr_scale: LrScale, chunk_bytes: int
    ) -> CommitRecord | None:
        """The record that the votes add up to; None if the ranks saw different contributors.

        The loss of a contributor is the mean over ranks, the norm is summed in rank order. If all gradients are
        finite and their sum is not, nobody can be blamed: all count as poisoned.
        """
        batches = {tuple((c.replica, c.weight, c.shard, c.index) for c in v.contributions) for v in self.votes}
        if len(batches) != 1:
            return None
        per_rank = zip(*(v.contributions for v in self.votes), strict=True)
        contributions = tuple(replace(row[0], loss=sum(c.loss for c in row) / len(row)) for row in per_rank)
        poisoned = tuple(sorted({r for v in self.votes for r in v.poisoned}))
        square = float(sum(v.sumsq for v in self.votes))
        if not poisoned and not math.isfinite(square):
            poisoned = tuple(c.replica for c in contributions)
        norm = 0.0 if poisoned else square**0.5 / max(1, sum(c.weight for c in contributions))
        return CommitRecord(
            epoch=self.fence.epoch,
            attempt=self.fence.attempt,
            step=self.fence.step,
            prev=prev,
            ring=ring,
            total=total,
            contributions=contributions,
            digest=digest([v.digest for v in self.votes]),
            norm=norm,
            lr_scale=lr_scale(len(contributions), total) if contributions else 1.0,
            chunk_bytes=chunk_bytes,
            poisoned=poisoned,
        )
