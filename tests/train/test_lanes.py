from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from ft_hsdp.core.commit import AttemptId, CommitRecord, Contribution, Vote, VoteTally
from ft_hsdp.core.effects import Reduce
from ft_hsdp.ftar.allreduce import AllReduceResult
from ft_hsdp.ftar.connections import LaneRing
from ft_hsdp.launch.run.replay_sums import equal_sums, lane_sums
from ft_hsdp.train import lanes
from ft_hsdp.train.gradients import Feeding, Reducer
from ft_hsdp.train.lanes import GradientLanes
from ft_hsdp.train.optimizer.groups import finish
from ft_hsdp.train.state import lane_slices
from ft_hsdp.train.state.packing import as_bytes
from tests.support.ftar.lane_rig import SHAPES, WideRank, WideRing, flat, joined, values
from tests.support.ftar.ring_helpers import until

PREV = "ab" * 16
COUNTS = 3  # elements of a bucket that is not cut


def units(rank: WideRank) -> tuple[Contribution, ...]:
    """What a rank has of its replica's contribution: its own weight and loss."""
    return (Contribution(rank.replica, rank.rank + 1, 0, 100 * rank.replica, 0.5 + rank.rank, rank.width),)


class Trainer:
    """A rank with a reducer, as the trainer has it."""

    def __init__(self, rank: WideRank, device: str = "cpu") -> None:
        self.rank, self.votes = rank, list[Vote]()
        numels = [flat(bucket, rank.width, rank.rank).numel() for bucket in values(0)]
        rank.lanes._whole = (COUNTS,)
        self.reducer = Reducer(
            rank.group,
            [*numels, COUNTS],
            rank.replica,
            rank.rank,
            self.votes.append,
            checked=lambda prev: "held",
            counted=[((0, n),) for n in numels],
            lanes=rank.lanes,
            checked_lanes=lambda plan: [f"slice {lane.ring.number}" for lane in plan.lanes],
        )

    def train(self, fence: AttemptId) -> None:
        """Bring all buckets, the last one first."""
        mine = units(self.rank)
        self.reducer.open(Feeding(fence.step))
        self.reducer.begin(Reduce(fence, "contribute", PREV, ((0, self.rank.width),)))
        bits = torch.tensor([1.0, float(self.rank.rank), float(self.rank.replica)])
        buckets = [flat(b, self.rank.width, self.rank.rank) for b in values(self.rank.replica)]
        for index, bucket in reversed(list(enumerate([*buckets, bits]))):
            self.reducer.ready(index, bucket, mine)


def record(replica: list[Trainer], grant: Any) -> CommitRecord:
    """What a replica's leader makes of the votes of its ranks."""
    tally = VoteTally(replica[0].votes[-1].fence, len(replica))
    for trainer in replica:
        tally = tally.add(trainer.votes[-1])
    assert tally.complete
    made = tally.record(PREV, grant.ring, 2, 7, "sqrt", 0, ring_widths=grant.widths)
    assert made is not None
    assert tally.state_digest
    return made


@pytest.mark.parametrize("large", [1, 6, lanes.LARGE])
@pytest.mark.parametrize("widths", [(4, 3), (4, 3, 2), (3, 3)])
async def test_replicas_of_any_width_make_one_record_and_one_gradient(
    widths: tuple[int, ...], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the rows of a bucket are summed: each run where it lies, the large ones so, or all copied."""
    monkeypatch.setattr(lanes, "LARGE", large)
    async with WideRing(widths, "auto") as ring:
        trainers = [[Trainer(rank) for rank in ranks] for ranks in ring.replicas]
        every = [trainer for replica in trainers for trainer in replica]
        given = ring.grant(1)
        for trainer in every:
            trainer.reducer.configure(given)
        await ring.form(1)
        fence = AttemptId(1, 1, 0)
        for trainer in every:
            trainer.train(fence)
        await until(lambda: all(t.votes for t in every), "all ranks vote", 30.0)
        first, *others = (record(replica, given) for replica in trainers)
        assert all(other == first for other in others), "digest, norm, weights and losses, to the last bit"
        weights = {c.replica: c.weight for c in first.contributions}
        assert weights == {r: sum(range(1, w + 1)) for r, w in enumerate(widths)}
        whole: list[list[dict[str, torch.Tensor]]] = []
        counts = []
        for replica in trainers:
            sums = [t.reducer.take() for t in replica]
            counts.append(torch.stack([s[-1] for s in sums]).sum(0))
            for s, trainer in zip(sums, replica, strict=True):
                finish(first, s[:-1], None, trainer.rank.width)
            like = enumerate(values(0))
            whole.append([joined([s[b] for s in sums], bucket) for b, bucket in like])
        divisor = first.divisor
        for index, bucket in enumerate(whole[0]):
            for name, total in bucket.items():
                assert all(torch.equal(total, other[index][name]) for other in whole), "the same bits"
                means = [values(r)[index][name] * w for r, w in enumerate(widths)]
                torch.testing.assert_close(total, sum(means) / divisor)
        shards = {r: [[flat(b, w, k) for b in values(r)] for k in range(w)] for r, w in enumerate(widths)}
        again = (lane_sums if first.ring_widths else equal_sums)(shards, first, SHAPES, every[0].rank.settings)
        for index, bucket in enumerate(whole[0]):
            added = [of_rank[index] for of_rank in again.reduced]
            finish(first, added, None, max(widths))
            found = joined(added, values(0)[index])
            assert all(torch.equal(found[name], total) for name, total in bucket.items()), "a replay adds alike"
        assert again.square**0.5 / (divisor / max(widths)) == first.norm
        squares = sum(float((t.double() ** 2).sum()) for bucket in whole[0] for t in bucket.values())
        assert first.norm == pytest.approx(squares**0.5)
        expected = torch.tensor([float(sum(widths)), sum(w * (w - 1) / 2 for w in widths), 0.0])
        expected[2] = sum(r * w for r, w in enumerate(widths))
        assert all(torch.equal(c, expected) for c in counts), "of what is not cut, each rank counts once"


async def test_a_retry_after_the_widths_changed_brings_the_same_gradient_again() -> None:
    async with WideRing((4, 4), "auto") as ring:
        wide = [Trainer(rank) for rank in ring.replicas[0]]
        given = ring.grant(1)
        for trainer in wide:
            trainer.reducer.configure(given)
        await ring.form(1)
        for trainer in wide:
            trainer.train(AttemptId(1, 1, 0))  # replica 1 brings nothing, and is lost
        for rank in ring.replicas[1]:
            await rank.group.close()
        ring.replicas[1] = ring.replica(1, 3)
        narrow = [Trainer(rank) for rank in ring.replicas[1]]
        given = ring.grant(2)
        for trainer in (*wide, *narrow):
            trainer.reducer.cancel()
            trainer.reducer.configure(given)
        await ring.form(2)
        fence = AttemptId(2, 1, 0)
        for trainer in wide:
            trainer.reducer.begin(Reduce(fence, "contribute", PREV, ((0, 4),)))
        for trainer in narrow:
            trainer.train(fence)
        await until(lambda: all(t.votes for t in (*wide, *narrow)), "all ranks vote", 30.0)
        assert record(wide, given) == record(narrow, given)


async def test_a_poisoned_rank_poisons_its_replica_in_the_record_of_all() -> None:
    async with WideRing((4, 3), "auto") as ring:
        trainers = [[Trainer(rank) for rank in ranks] for ranks in ring.replicas]
        given = ring.grant(1)
        for trainer in (*trainers[0], *trainers[1]):
            trainer.reducer.configure(given)
        await ring.form(1)
        bad = trainers[1][2]
        ready = bad.reducer.ready

        def spoil(bucket: int, gradient: torch.Tensor, mine: tuple[Contribution, ...]) -> None:
            ready(bucket, gradient.fill_(float("nan")) if bucket == 0 else gradient, mine)

        bad.reducer.ready = spoil  # type: ignore[method-assign]
        for trainer in (*trainers[0], *trainers[1]):
            trainer.train(AttemptId(1, 1, 0))
        await until(lambda: all(t.votes for replica in trainers for t in replica), "all ranks vote", 30.0)
        made = [record(replica, given) for replica in trainers]
        assert [m.poisoned for m in made] == [(1,), (1,)]


class Counting:
    """A group that counts all-reduces and checks that nothing is copied."""

    def __init__(self, group: Any) -> None:
        self.group, self.asked = group, list[tuple[int, torch.Tensor | None]]()
        self.arena, self.transports = group.arena, ("shm", "shm")

    def all_reduce(
        self, key: Any, local: Any, out: torch.Tensor, *rest: Any, **more: Any
    ) -> Future[AllReduceResult]:
        assert not more, "no lane is named"
        self.asked.append((key.bucket, local))
        work: Future[AllReduceResult] = Future()
        work.set_result(AllReduceResult(out.zero_(), (rest[0],), 0))
        return work


async def test_equal_widths_cost_no_copy_no_ring_and_no_byte() -> None:
    async with WideRing((3, 3)) as ring:
        given = await ring.form(1)
        rank = ring.replicas[0][1]
        counting = Counting(rank.group)
        trainer = Trainer(rank)
        trainer.reducer._group = counting  # type: ignore[assignment]
        trainer.reducer.configure(given)
        gradients = [flat(b, 3, 1) for b in values(0)]
        trainer.reducer.open(Feeding(1))
        trainer.reducer.begin(Reduce(AttemptId(1, 1, 0), "contribute", PREV, ((0, 3),)))
        for index, bucket in enumerate([*gradients, torch.ones(COUNTS)]):
            trainer.reducer.ready(index, bucket, units(rank))
        assert [b for b, _ in counting.asked] == [0, 1, 2, 3]
        for (_, local), mine in zip(counting.asked, gradients, strict=False):
            assert local is mine, "the gradient itself is sent, and no copy"
        assert trainer.votes[0].lanes == ()
        assert not trainer.reducer._parts
        assert len(rank.group._lanes) == 1
        assert len([t for t in rank.group.transports if t]) == 2, "one ring, with two edges"


async def test_the_lanes_of_a_replica_have_each_row_once() -> None:
    """So what its ranks send is the gradient, as with equal widths, and no padding."""
    async with WideRing((4, 3)) as ring:
        given = ring.grant(1)
        for ranks in ring.replicas:
            plans = [rank.lanes.plan(given.widths) for rank in ranks]
            sizes = [part.size for plan in plans if plan for lane in plan.lanes for part in lane.parts]
            assert sum(sizes) == sum(t.numel() for bucket in values(0) for t in bucket.values())
            assert [len(plan.lanes) for plan in plans if plan] == ([1, 2, 2, 1] if len(ranks) == 4 else [2, 2, 2])


@pytest.mark.parametrize("large", [1, 6, 10, lanes.LARGE])
def test_the_parts_of_a_rank_are_its_rows(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered and scattered, a gradient is what it was, without its padding."""
    monkeypatch.setattr(lanes, "LARGE", large)
    for width, other in ((4, 3), (3, 4), (8, 7), (7, 8)):
        for rank in range(width):
            wide, narrow = max(width, other), min(width, other)
            plan = GradientLanes(SHAPES, (), LaneRing(rank, ""), width, rank)._divide((wide, narrow))
            for index, bucket in enumerate(values(1)):
                gradient = flat(bucket, width, rank)
                out = torch.zeros_like(gradient)
                for lane in plan.lanes:
                    part = lane.parts[index]
                    if not part.size:
                        continue
                    target = part.target(out, lambda _, numel: torch.empty(numel))
                    for piece, given in zip(target.pieces, part.gather(gradient, target).pieces, strict=True):
                        piece.copy_(given)
                    part.scatter(target, out)
                torch.testing.assert_close(out, gradient * (width / max(width, other)), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("large", "expected"),
    [
        (1, ((12, 2, 5), (300,), (3,), (6, 1, 2, 9), (3,))),
        (6, ((12, 7), (300,), (3,), (6, 3, 9), (3,))),
        (lanes.LARGE, ((19,), (300,), (3,), (18,), (3,))),
    ],
)
def test_the_members_of_a_lane_group_rows_alike_and_large_ones_lie_where_they_belong(
    large: int, expected: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "LARGE", large)
    shapes = [*SHAPES, [("f", (9, 2)), ("g", (4, 1)), ("h", (5, 1)), ("i", (11, 3))]]
    grouped: dict[int, set[tuple[tuple[int, ...], ...]]] = {}
    for width in (4, 3):
        for rank in range(width):
            of_rank = GradientLanes(shapes, (COUNTS,), LaneRing(rank, ""), width, rank)
            for lane in of_rank._divide((4, 3)).lanes:
                sizes = tuple(tuple(group.size for group in part.groups) for part in lane.parts)
                grouped.setdefault(lane.ring.number, set()).add(sizes)
                for group in (group for part in lane.parts if not part.whole for group in part.groups):
                    assert len(group.runs) == 1 or all(run.size < large for run in group.runs)
                    assert sum(run.size for run in group.runs) == group.size
    assert all(len(each) == 1 for each in grouped.values())
    assert grouped[0] == {expected}


def test_owners_of_a_lane_compare_the_same_bytes_of_the_state() -> None:
    """Sixteen slices cover each lane; a byte that differs shows in one of them, whoever has another width."""
    shapes = [shape for bucket in SHAPES for _, shape in bucket] * 2
    whole = [t for bucket in values(3) for t in bucket.values()] * 2
    steps = torch.tensor([7.0])  # every rank has it whole

    def digests(width: int, rank: int, step: int, tensors: list[torch.Tensor]) -> dict[int, str]:
        plan = GradientLanes(SHAPES, (), LaneRing(rank, ""), width, rank)._divide((4, 3))
        shards = []
        for tensor in tensors:
            chunk = -(-len(tensor) // width)
            shards.append(tensor[rank * chunk : (rank + 1) * chunk].contiguous())
        nbytes = [(shard.numel() * 4, 4) for shard in [*shards, steps]]
        mine = lane_slices.pieces(plan, [*shapes, None], nbytes, width, rank)
        held = [as_bytes(shard) for shard in [*shards, steps]]
        each = [lane_slices.digest(step, pieces, held, b"") for pieces in mine]
        return dict(zip((lane.ring.number for lane in plan.lanes), each, strict=True))

    def of_replica(width: int, step: int, tensors: list[torch.Tensor]) -> dict[int, str]:
        return {n: d for rank in range(width) for n, d in digests(width, rank, step, tensors).items()}

    for step in range(16):
        assert of_replica(4, step, whole) == of_replica(3, step, whole)
    damaged = [t.clone() for t in whole]
    damaged[3][17, 4] += 1.0
    differ = [step for step in range(16) if of_replica(4, step, damaged) != of_replica(3, step, whole)]
    assert len(differ) == 1
