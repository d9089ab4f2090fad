"""The record of a step, the token that decides whether it is committed, and the tally of one replica's votes.

FT-HSDP §4.1 lets each replica decide for itself whether a step succeeded, so replicas may differ. Here the leaders
pass a token round their ring twice: pass 1 combines the votes (one no is a no), pass 2 carries the verdict. Votes
and tokens name the attempt (epoch, step, attempt) that they are about, so a late one never counts for another
step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import Digests, StateId, advance, digest

Intervention = Literal["none", "linear", "sqrt"]
_POWER = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One attempt at a step. Votes and tokens carry it as a fence: those of another attempt are not counted."""

    epoch: int  # the granted membership that makes the attempt
    step: int  # number of the step, from 1
    attempt: int  # from 0 for each step of an epoch


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one replica put into a step."""

    replica: int  # replica id
    weight: int  # of its gradient in the sum; the sum is divided by the sum of the weights
    shard: int  # data shard of its batch
    index: int  # number of its batch in that data shard
    loss: float = 0.0  # mean loss over the batch, for metrics only


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """All that is needed to apply a step in the same way on every replica, and to replay it later.

    A record with `poisoned` contributors is that of a skipped step: it changes the ledger and the name of the
    state, and no weight.
    """

    epoch: int  # of the attempt that was committed
    attempt: int  # number of that attempt
    step: int  # number of the step
    prev: str  # lineage of the state that the step builds on
    ring: tuple[int, ...]  # replica ids in the order of addition
    total: int  # replicas of the job, for the learning rate
    contributions: tuple[Contribution, ...]  # whose gradients are in the sum
    digest: str  # hash of the reduced shards' hashes, in rank order
    norm: float = 0.0  # of the reduced gradient, after the division; squares are summed in rank order
    lr_scale: float = 1.0  # factor on the learning rate for a step with fewer contributors (FT-HSDP §6.2)
    chunk_bytes: int = 0  # size of a chunk, which with `ring` fixes the order of addition
    poisoned: tuple[int, ...] = ()  # contributors whose gradient is not finite
    # Batches (data shard, index) that the step goes without: not finite in an earlier attempt.
    spoiled: tuple[tuple[int, int], ...] = ()
    retries: int = 0  # a spoiled batch that was left out of so many steps is given up

    @property
    def state_id(self) -> StateId:
        """The state that this record leads to, applied to its predecessor."""
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
        """The contributors, sorted, whose batch another contributor with a lower id has too.

        It must not count twice.
        """
        lowest: dict[tuple[int, int], int] = {}
        for c in sorted(self.contributions, key=lambda c: c.replica):
            lowest.setdefault((c.shard, c.index), c.replica)
        mine = {c.replica for c in self.contributions if lowest[c.shard, c.index] != c.replica}
        return tuple(sorted(mine))

    @property
    def divisor(self) -> int:
        """What the sum is divided by: the sum of the contributors' weights, never the size of the ring."""
        return sum(c.weight for c in self.contributions)

    @property
    def skipped(self) -> bool:
        """Whether the step changes no weight, because its sum is not finite.

        It still counts, and its batches are spent.
        """
        return bool(self.poisoned)

    @property
    def loss(self) -> float:
        """The weighted mean loss over the contributors.

        Of a skipped step over those whose loss is finite, or NaN.
        """
        finite = [c for c in self.contributions if math.isfinite(c.loss)] if self.skipped else self.contributions
        return sum(c.weight * c.loss for c in finite) / sum(c.weight for c in finite) if finite else math.nan

    def ledger(self, before: Ledger) -> Ledger:
        """Return the ledger after this step.

        Args:
            before: the ledger of the state that the step builds on.

        Returns:
            The ledger of `state_id`.

        Raises:
            ValueError: a batch of the record was trained before, or too many batches would be left out.
        """
        batches = ((c.shard, c.index) for c in self.contributions)
        return before.advance(batches, self.contributors, self.spoiled, self.retries)

    def given_up(self, before: Ledger) -> tuple[tuple[int, int], ...]:
        """Return the batches that this step spends without training them: their gradients were never finite.

        Args:
            before: the ledger of the state that the step builds on.

        Returns:
            (data shard, index), sorted.
        """
        return before.given_up(self.spoiled, self.retries)


def lr_scale(intervention: Intervention, contributors: int, total: int) -> float:
    """Return the factor on the learning rate of a step to which not all replicas contributed (FT-HSDP §6.2).

    It is computed from the commit record, so it is right on the step on which a replica leaves and on the one on
    which it returns. 11 of 12 contributors give 0.9167 (linear) or 0.9574 (sqrt).

    Args:
        intervention: how the factor depends on the share of contributors.
        contributors: replicas in the sum.
        total: replicas of the job.

    Returns:
        A factor in (0, 1].

    Raises:
        ValueError: `contributors` is not in 1..`total`.
    """
    if not 0 < contributors <= total:
        raise ValueError(f"contributors must be within 1..{total}, got {contributors}")
    return float((contributors / total) ** _POWER[intervention])


@dataclass(frozen=True, slots=True)
class CommitToken:
    """The commit token, as it travels from leader to leader.

    Pass 1 gathers what each member adds; pass 2, with `verdict` set, repeats it. All members therefore decide
    alike on everything that follows from the token.
    """

    fence: AttemptId  # the attempt that it is about
    verdict: bool  # False in pass 1, True in pass 2
    yes: bool  # whether all members so far voted yes
    lineage: str  # that of the state that the first member's record leads to
    equal: tuple[int, ...] = ()  # replicas that hold the state that the step builds on
    leaving: tuple[int, ...] = ()  # replicas that leave after this step
    digests: Digests = ()  # hashes of the compared slice of that state
    lagging: tuple[int, ...] = ()  # replicas that dropped their log and need a newer base
    unwritable: tuple[int, ...] = ()  # replicas that could not write their last checkpoint
    reason: str = field(default="", compare=False)  # of the first no
    checkpoint: int = 0  # newest demand that a member heard of: write a state of that step or later; 0: none
    writing: tuple[int, ...] = ()  # replicas that write a checkpoint now


def fenced(current: AttemptId, fence: AttemptId) -> bool:
    """Return whether a vote or token about `fence` counts for the attempt `current`."""
    return current == fence


def void(fence: AttemptId, known: tuple[AttemptId, ...]) -> bool:
    """Return whether the attempt `fence` can never be committed.

    Args:
        fence: the attempt in question.
        known: attempts that are known to have had no yes. A later attempt of the same step and epoch counts too,
            because it begins only after the earlier one was given up.

    Returns:
        True if a record of `fence` may be dropped.
    """
    return any((k.epoch, k.step) == (fence.epoch, fence.step) and k.attempt >= fence.attempt for k in known)


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of one rank: it holds its reduced shard."""

    rank: int  # rank within the replica
    fence: AttemptId  # the attempt that it voted on
    digest: str  # hash of the reduced shard
    sumsq: float  # sum of squares of the reduced shard, before the division
    contributions: tuple[Contribution, ...]  # as the frame headers of its ring named them, with this rank's losses
    poisoned: tuple[int, ...] = ()  # replicas whose gradient was not finite
    state_digest: str = ""  # hash of the slice of the base state that is compared at this step; "": not held
    kept: bool = False  # whether this rank's host has a complete copy of its shard of the base state


@dataclass(frozen=True, slots=True)
class VoteTally:
    """The votes of a replica's ranks on one attempt; complete when every rank has voted."""

    fence: AttemptId  # the attempt
    ranks: int  # number of ranks of the replica
    votes: tuple[Vote, ...] = field(default=())  # at most one per rank, in rank order

    def add(self, vote: Vote) -> VoteTally:
        """Return the tally with `vote`, or unchanged if it is about another attempt or its rank has voted."""
        if not fenced(self.fence, vote.fence) or any(v.rank == vote.rank for v in self.votes):
            return self
        return replace(self, votes=tuple(sorted((*self.votes, vote), key=lambda v: v.rank)))

    @property
    def complete(self) -> bool:
        """Whether all ranks have voted, so that all hold their reduced shards."""
        return len(self.votes) == self.ranks

    @property
    def kept(self) -> bool:
        """Whether all ranks have a copy of the base state, so that older copies may be dropped."""
        return self.complete and all(v.kept for v in self.votes)

    @property
    def state_digest(self) -> str:
        """The hash of the ranks' state digests, in rank order; "" if a rank does not hold its slice."""
        digests = [v.state_digest for v in self.votes]
        return digest(digests) if all(digests) else ""

    def record(
        self, prev: str, ring: tuple[int, ...], total: int, intervention: Intervention, chunk_bytes: int
    ) -> CommitRecord | None:
        """Return the record that the votes add up to; None if the ranks saw different contributors.

        The loss of a contributor is the mean over the ranks. If all gradients are finite and their sum is not, no
        single replica can be blamed: all contributors count as poisoned.

        Args:
            prev: lineage of the state that the step builds on.
            ring: replica ids in ring order.
            total: replicas of the job.
            intervention: how the learning rate depends on the share of contributors.
            chunk_bytes: size of a chunk of the all-reduce.

        Returns:
            The record, or None.
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
            lr_scale=lr_scale(intervention, len(contributions), total) if contributions else 1.0,
            chunk_bytes=chunk_bytes,
            poisoned=poisoned,
        )
