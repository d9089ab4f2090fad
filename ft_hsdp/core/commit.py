"""The record of a step, the token that decides whether it is committed, and the tally of one replica's votes.

FT-HSDP §4.1 lets each replica decide for itself whether a step succeeded, so replicas may differ. Here the leaders
pass a token round their ring twice: pass 1 combines the votes (one no is a no), pass 2 carries the verdict. Votes
and tokens name the attempt (epoch, step, attempt) that they are about, so a late one never counts for another
step.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from ft_hsdp.core.ledger import MAX_UNIT, Ledger, Run, overlaps
from ft_hsdp.core.state_id import Digests, StateId, advance, digest

Intervention = Literal["none", "linear", "sqrt"]
MAX_RUNS = 8  # runs of units that a replica trains in one step
MAX_PARTS = 4  # in which it reduces them (`Contribution.part`); the end of a part may cut a run in two
MAX_ROWS = MAX_RUNS + MAX_PARTS - 1  # contributions of a replica to one step
MAX_WEIGHT = 2**31  # of a unit
SPREAD = 0.1  # of the median norm: a median deviation below it counts as so much
_POWER = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One attempt at a step. Votes and tokens carry it as a fence: those of another attempt are not counted."""

    epoch: int  # the granted membership that makes the attempt
    step: int  # number of the step, from 1
    attempt: int  # from 0 for each step of an epoch


@dataclass(frozen=True, slots=True)
class Contribution:
    """One run of units that one replica put into a step; it may put in several."""

    replica: int  # replica id
    weight: int  # units, or tokens in them, of the run; the sum is divided by the sum of the weights
    shard: int  # data shard of the units
    index: int  # number of the first unit in that data shard
    loss: float = 0.0  # weighted mean loss of the replica in this step, for metrics only
    units: int = 1  # how many units
    # 0: reduced inside the replica with its other runs of part 0. 1 and above: trained later, because another
    # contributor was lost, and added to the parts before.
    part: int = 0
    # Data ranks that trained it: rank k mod width the k-th unit of a part. 0: as many as the configuration says.
    width: int = 0

    @property
    def run(self) -> Run:
        """The units as a run of the ledger."""
        return self.shard, self.index, self.units


def impossible(rows: Sequence[Contribution]) -> str:
    """Return in one line why no replica can have put these `rows` of it into one step; "" if it can be true."""
    if len(rows) > MAX_ROWS:
        return f"{len(rows)} contributions; at most {MAX_ROWS} are allowed"
    part = 0
    for c in rows:
        if not (0 <= c.index <= MAX_UNIT and 0 < c.units <= MAX_UNIT - c.index):
            return f"{c.units} units from {c.index}; allowed: at least 1, from unit 0 to unit {MAX_UNIT - 1}"
        if not 0 <= c.weight <= c.units * MAX_WEIGHT:
            return f"a weight of {c.weight} for {c.units} units; allowed: 0 to {MAX_WEIGHT} for each"
        if c.part not in (part, part + 1) or c.part >= MAX_PARTS:
            return f"part {c.part} after part {part}; allowed: the same or the next one, below {MAX_PARTS}"
        part = c.part
    runs = sorted(c.run for c in rows)
    if any(a[0] == b[0] and a[1] + a[2] > b[1] for a, b in pairwise(runs)):
        return "one unit twice"
    return "units of two data shards" if len({shard for shard, _, _ in runs}) > 1 else ""


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
    contributions: tuple[Contribution, ...]  # what is in the sum, sorted
    digest: str  # hash of the reduced shards' hashes, in the order of ranks, or of lanes if widths differ
    norm: float = 0.0  # of the gradient, after the division; squares are summed in that order
    lr_scale: float = 1.0  # factor on the learning rate for a step with fewer units (FT-HSDP §6.2)
    chunk_bytes: int = 0  # size of a chunk, which with `ring` fixes the order of addition
    poisoned: tuple[int, ...] = ()  # contributors whose gradient is not finite, or one of the `outliers`
    spoiled: tuple[Run, ...] = ()  # units that the step goes without: not finite in an earlier attempt
    retries: int = 0  # a spoiled unit that was left out of so many steps is given up
    wanted: int = 0  # units of a step to which all replicas contribute
    ring_widths: tuple[int, ...] = ()  # ranks of each member, in ring order, if they differ
    outliers: tuple[int, ...] = ()  # of the `poisoned`, those with a finite gradient

    @property
    def state_id(self) -> StateId:
        """The state that this record leads to, applied to its predecessor."""
        batches = [(c.replica, c.weight, *c.run, c.part) for c in self.contributions]
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
        return tuple(sorted({c.replica for c in self.contributions}))

    @property
    def fault(self) -> str:
        """What is wrong with the gradients of the poisoned or doubled, in words; "" if there are none."""
        far, broken = list(self.outliers), [r for r in self.poisoned if r not in self.outliers]
        said = [f"gradient of replicas {broken} is not finite"] if broken else []
        said += [f"norm of the gradient of replicas {far} is far from that of the others"] if far else []
        if not said and self.doubled:
            return f"replicas {list(self.doubled)} brought units that others bring"
        return " and ".join(said)

    @property
    def doubled(self) -> tuple[int, ...]:
        """The contributors, sorted, that have a unit which another contributor with a lower id has too.

        It must not count twice.
        """
        runs = {r: [c.run for c in self.contributions if c.replica == r] for r in self.contributors}
        return tuple(r for r in runs if any(overlaps(runs[r], runs[lower]) for lower in runs if lower < r))

    def impossible(self, shared: bool) -> str:
        """Return in one line why the contributions cannot be those of one step; "" if it can be true.

        If they are `shared`, all contributors take from data shard 0, otherwise each from its own.
        """
        if strange := sorted(set(self.contributors) - set(self.ring)):
            return f"replicas {strange} contributed; allowed: those of the ring {list(self.ring)}"
        for replica in self.contributors:
            rows = [c for c in self.contributions if c.replica == replica]
            shard = 0 if shared else replica
            if wrong := impossible(rows):
                return f"replica {replica} says {wrong}"
            if rows[0].shard != shard:
                return f"replica {replica} says units of data shard {rows[0].shard}; allowed: of {shard}"
        return ""

    @property
    def units(self) -> int:
        """How many units are in the sum."""
        return sum(c.units for c in self.contributions)

    @property
    def divisor(self) -> int:
        """The sum of the contributors' weights, never the size of the ring.

        The sum of the gradients is divided by it. Each replica has divided by its number of data ranks before;
        if these differ, all have divided by the largest.
        """
        return sum(c.weight for c in self.contributions)

    @property
    def skipped(self) -> bool:
        """Whether the step changes no weight, because its sum is not finite.

        It still counts, and its units are spent.
        """
        return bool(self.poisoned)

    @property
    def updates(self) -> bool:
        """Whether the step changes the weights: its sum is finite, and something in it counts."""
        return not self.skipped and self.divisor > 0

    @property
    def loss(self) -> float:
        """The weighted mean loss over the contributors; NaN if nothing counts.

        Of a skipped step over those whose loss is finite.
        """
        counted = [c for c in self.contributions if c.weight and (math.isfinite(c.loss) or not self.skipped)]
        return sum(c.weight * c.loss for c in counted) / sum(c.weight for c in counted) if counted else math.nan

    def ledger(self, before: Ledger) -> Ledger:
        """Return the ledger of `state_id`; `before` is that of the state that the step builds on.

        Raises:
            ValueError: a unit of the record was trained before, or too many would be left out.
        """
        return before.advance((c.run for c in self.contributions), self.spoiled, self.retries)

    def given_up(self, before: Ledger) -> tuple[Run, ...]:
        """Return the units that this step spends untrained, by the ledger `before`: they were never finite."""
        return before.given_up(self.spoiled, self.retries)


def outliers(norms: Mapping[int, float], mads: float) -> tuple[int, ...]:
    """Return the contributors, sorted, whose gradient's norm is too far from the median of all of them.

    Fewer than three are not judged. With `mads` of at least 1 most contributors never are outliers.

    Args:
        norms: by replica, of its gradient for one unit of weight.
        mads: so many times the median of the distances from that median are allowed. That median counts as at
            least `SPREAD` of the norm.
    """
    middle = median(norms.values()) if len(norms) > 2 else 0.0
    spread = max(SPREAD * middle, median(abs(norm - middle) for norm in norms.values())) if middle else math.inf
    return tuple(sorted(r for r, norm in norms.items() if abs(norm - middle) > mads * spread))


def lr_scale(intervention: Intervention, units: int, wanted: int) -> float:
    """Return the factor on the learning rate of a step with fewer units than wanted (FT-HSDP §6.2).

    It is computed from the commit record, so it is right on the step on which a replica leaves and on the one on
    which it returns. 11 of 12 units give 0.9167 (linear) or 0.9574 (sqrt). More units than wanted give 1.

    Args:
        intervention: how the factor depends on the share of units.
        units: in the sum.
        wanted: units of a step to which all replicas contribute.

    Raises:
        ValueError: a number is less than 1.
    """
    if units < 1 or wanted < 1:
        raise ValueError(f"units and wanted units must be at least 1, got {units} and {wanted}")
    return float(min(1.0, units / wanted) ** _POWER[intervention])


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
    stop: bool = False  # a script has stopped the job: all leave after this step


def void(fence: AttemptId, known: tuple[AttemptId, ...]) -> bool:
    """Return whether the attempt `fence` can never be committed, so a record of it may be dropped.

    The attempts in `known` had no yes. A later attempt of the same step and epoch counts too, because it begins
    only after the earlier one was given up.
    """
    return any((k.epoch, k.step) == (fence.epoch, fence.step) and k.attempt >= fence.attempt for k in known)


@dataclass(frozen=True, slots=True)
class LaneVote:
    """What a rank votes on one of its lanes (`memory.lanes`); with replicas of equal width, on the only one."""

    number: int  # of the lane; of the only one that of the rank
    owners: tuple[tuple[int, int], ...]  # (ranks of a replica, rank that has the lane); (): of any, rank `number`
    digest: str  # hash of the lane's sums
    sumsq: float  # sum of squares of them, before the division
    contributions: tuple[Contribution, ...]  # as its ring named them, each with the weight of the lane's owner
    state_digest: str = ""  # hash of the slice of what the lane has of the base state; "": not held


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of one rank: it holds its reduced shard.

    As a message it has two forms, which only `on` and `sums` know: its only lane, or `lanes`.
    """

    rank: int  # rank within the replica
    fence: AttemptId  # the attempt that it voted on
    digest: str  # hash of the reduced shard
    sumsq: float  # sum of squares of the reduced shard, before the division
    # As the frame headers of its ring named them: with the weights and losses of ranks of this number only.
    contributions: tuple[Contribution, ...]
    poisoned: tuple[int, ...] = ()  # replicas whose gradient was not finite
    state_digest: str = ""  # hash of the slice of the base state that is compared at this step; "": not held
    # Whether its shard of the base state is complete in memory, and so are the copies that its host has to make.
    kept: bool = False
    left_out: bool = False  # its shard is to be copied by another host, and there is nothing to copy
    waited_s: float = 0.0  # for those copies, once all else was ready
    copied: int = 0  # bytes of those copies
    late: bool = False  # some of them were still under way when the wait ran out; not: refused, failed, or lost
    refused: tuple[int, ...] = ()  # ranks of its replica whose shards its host does not keep, though it is to
    squares: tuple[tuple[int, float], ...] = ()  # by contributor, of what it put in; (): not known
    # With these, `digest`, `sumsq`, `contributions` and `state_digest` say nothing.
    lanes: tuple[LaneVote, ...] = ()

    @classmethod
    def on(
        cls,
        rank: int,
        fence: AttemptId,
        sums: tuple[LaneVote, ...],
        poisoned: tuple[int, ...] = (),
        squares: tuple[tuple[int, float], ...] = (),
    ) -> Vote:
        """Return the vote of a `rank` on the `sums` of its lanes in the attempt `fence`.

        The owners of an only lane that is the rank's are (). The gradients of the replicas `poisoned` were not
        finite; those of the others had these `squares`.
        """
        if any(lane.owners for lane in sums):
            return cls(rank, fence, "", 0.0, (), poisoned, lanes=sums)
        (only,) = sums
        said = only.digest, only.sumsq, only.contributions, poisoned, only.state_digest
        return cls(rank, fence, *said, squares=squares)

    @property
    def sums(self) -> tuple[LaneVote, ...]:
        """What the rank votes on each of its lanes."""
        only = LaneVote(self.rank, (), self.digest, self.sumsq, self.contributions, self.state_digest)
        return self.lanes or (only,)


@dataclass(frozen=True, slots=True)
class VoteTally:
    """The votes of a replica's ranks on one attempt; complete when every rank has voted."""

    fence: AttemptId  # the attempt
    ranks: int  # number of ranks of the replica
    votes: tuple[Vote, ...] = field(default=())  # at most one per rank, in rank order
    ranks_per_unit: int = 1  # so many ranks that follow each other train the same units

    def add(self, vote: Vote) -> VoteTally:
        """Return the tally with `vote`, or unchanged if it is about another attempt or its rank has voted."""
        if vote.fence != self.fence or any(v.rank == vote.rank for v in self.votes):
            return self
        return replace(self, votes=tuple(sorted((*self.votes, vote), key=lambda v: v.rank)))

    @property
    def complete(self) -> bool:
        """Whether all ranks have voted, so that all hold their reduced shards."""
        return len(self.votes) == self.ranks

    @property
    def kept(self) -> bool:
        """Whether the base state is complete in all promised places, so that older copies may be dropped."""
        return self.complete and all(v.kept for v in self.votes)

    @property
    def state_digest(self) -> str:
        """The hash of the state digests, in the order of lanes; "" if one is not held."""
        digests = [lane.state_digest for lane in self._lanes]
        return digest(digests) if all(digests) else ""

    @property
    def _lanes(self) -> list[LaneVote]:
        return sorted((lane for v in self.votes for lane in v.sums), key=lambda lane: lane.number)

    def _rows(self, widths: Mapping[int, int]) -> list[tuple[Contribution, ...]] | None:
        """Return what each data rank has of each contribution; None if votes contradict each other.

        The replicas of the ring have so many ranks as `widths` says, if they differ; ranks then train units by
        themselves.
        """
        lanes = self._lanes
        if len({tuple((c.replica, *c.run, c.part) for c in lane.contributions) for lane in lanes}) != 1:
            return None
        found: list[dict[int, Contribution]] = [{} for _ in lanes[0].contributions]
        for lane in lanes:
            owners = dict(lane.owners)
            for known, c in zip(found, lane.contributions, strict=True):
                rank = owners[widths[c.replica]] if owners else lane.number // self.ranks_per_unit
                if known.setdefault(rank, c).weight != c.weight:
                    return None
        return [tuple(known[rank] for rank in sorted(known)) for known in found]

    def record(
        self,
        prev: str,
        ring: tuple[int, ...],
        total: int,
        wanted: int,
        intervention: Intervention,
        chunk_bytes: int,
        widths: Mapping[int, int] | None = None,
        ring_widths: tuple[int, ...] = (),
        mads: float | None = None,
    ) -> CommitRecord | None:
        """Return the record that the votes add up to; None if the ranks saw different contributors.

        It is None, too, if ranks that train the same units give them different weights. The weight of a
        contribution is the sum over the data ranks, its loss their weighted mean. If all gradients are
        finite and their sum is not, no single replica can be blamed: all contributors count as poisoned.

        Args:
            prev: lineage of the state that the step builds on.
            ring: replica ids in ring order.
            total: replicas of the job.
            wanted: units of a step to which all replicas contribute.
            intervention: how the learning rate depends on the share of units.
            chunk_bytes: size of a chunk of the all-reduce.
            widths: data ranks of the contributors that have fewer than the configuration says, by replica id.
            ring_widths: ranks of each member, in ring order, if they differ.
            mads: limit for `outliers`, which are poisoned, too; None: none. They are looked for in the first
                attempt at a step alone, so that what is left without them is committed.
        """
        rows = self._rows(dict(zip(ring, ring_widths, strict=True)) if ring_widths else {})
        if rows is None:
            return None
        narrow = widths or {}
        contributions = tuple(replace(over_data_ranks(row), width=narrow.get(row[0].replica, 0)) for row in rows)
        poisoned = tuple(sorted({r for v in self.votes for r in v.poisoned}))
        far = () if mads is None or self.fence.attempt else outliers(self._norms(contributions, poisoned), mads)
        poisoned = tuple(sorted({*poisoned, *far}))
        square = float(sum(lane.sumsq for lane in self._lanes))
        if not poisoned and not math.isfinite(square):
            poisoned = tuple(sorted({c.replica for c in contributions}))
        data_ranks = self.ranks // self.ranks_per_unit
        weight, units = sum(c.weight for c in contributions), sum(c.units for c in contributions)
        norm = 0.0 if poisoned or not weight else square**0.5 / (weight / max(ring_widths, default=data_ranks))
        return CommitRecord(
            epoch=self.fence.epoch,
            attempt=self.fence.attempt,
            step=self.fence.step,
            prev=prev,
            ring=ring,
            total=total,
            contributions=contributions,
            digest=digest([lane.digest for lane in self._lanes]),
            norm=norm,
            wanted=wanted,
            lr_scale=lr_scale(intervention, units, wanted) if contributions else 1.0,
            chunk_bytes=chunk_bytes,
            poisoned=poisoned,
            ring_widths=ring_widths,
            outliers=far,
        )

    def _norms(self, contributions: Sequence[Contribution], poisoned: Sequence[int]) -> dict[int, float]:
        """Return the norm of the gradient of each replica that is not `poisoned`, for one unit of weight."""
        weights: Counter[int] = Counter()
        for c in contributions:
            weights[c.replica] += c.weight
        found: dict[int, float] = defaultdict(float)
        for replica, square in (each for v in self.votes for each in v.squares):
            if weights[replica] and replica not in poisoned:
                found[replica] += square
        return {replica: square**0.5 / weights[replica] for replica, square in found.items()}


def over_data_ranks(row: tuple[Contribution, ...]) -> Contribution:
    """Return one contribution as a whole: its weight is the sum over `row`, what each data rank has of it."""
    weight = sum(c.weight for c in row)
    loss = sum(c.weight * c.loss for c in row if c.weight) / weight if weight else 0.0
    return replace(row[0], weight=weight, loss=loss)
