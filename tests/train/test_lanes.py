import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ft_hsdp.core.commit import AttemptId, CommitRecord, Contribution, Vote, VoteTally
from ft_hsdp.core.effects import Reduce
from ft_hsdp.core.ring import OperationKind
from ft_hsdp.core.state_id import digest
from ft_hsdp.errors import Retryable
from ft_hsdp.ftar.allreduce import AllReduceResult
from ft_hsdp.ftar.dataplane.cpu import CpuJob
from ft_hsdp.ftar.pieces import pieced
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.train import lanes
from ft_hsdp.train.gradients import Feeding, Reducer
from ft_hsdp.train.lanes import LanePlan
from ft_hsdp.train.optimizer.groups import finish
from ft_hsdp.train.replay.lanes import SharedLanes
from ft_hsdp.train.state import live_state
from ft_hsdp.train.state.packing import as_bytes
from tests.support.ftar.ring_helpers import SHAPES, WideRank, WideRing, flat, joined, lanes_of, values
from tests.support.waiting import async_until

PREV = "ab" * 16


@pytest.fixture
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of so many elements are summed where they lie."""
    elements: int = request.param
    monkeypatch.setattr(lanes, "LARGE", elements)
    return elements


def units(rank: WideRank) -> tuple[Contribution, ...]:
    """What a rank has of its replica's contribution: its own weight and loss."""
    return (Contribution(rank.replica, rank.rank + 1, 0, 100 * rank.replica, 0.5 + rank.rank, rank.width),)


class Trainer:
    def __init__(self, rank: WideRank, group: Any = None) -> None:
        self.rank, self.votes = rank, list[Vote]()
        self.reducer = Reducer(
            group or rank.group,
            rank.lanes,
            rank.replica,
            rank.rank,
            self.votes.append,
            checked=lambda prev, plan: [f"slice {lane.ring.number}" for lane in plan.lanes],
        )

    def begin(self, fence: AttemptId) -> None:
        """Begin an attempt with what was brought."""
        self.reducer.begin(Reduce(fence, "contribute", PREV, ((0, self.rank.width),)))

    def train(self, fence: AttemptId) -> list[torch.Tensor]:
        """Bring all buckets, the last one first; returns them."""
        mine, buckets = units(self.rank), self.trained()
        self.reducer.open(Feeding(fence.step))
        self.begin(fence)
        for index, bucket in reversed(list(enumerate(buckets))):
            self.reducer.ready(index, bucket, mine, lambda: 0.0)
        return buckets

    def trained(self) -> list[torch.Tensor]:
        """The local gradient of each bucket, and what is not cut."""
        bits = torch.tensor([1.0, float(self.rank.rank), float(self.rank.replica)])
        return [*(flat(b, self.rank.width, self.rank.rank) for b in values(self.rank.replica)), bits]


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


def gradients(
    replicas: list[list[Trainer]], made: CommitRecord, taken: list[list[list[torch.Tensor]]] | None = None
) -> list[list[dict[str, torch.Tensor]]]:
    """The whole mean gradient that each replica applies: all have the same bits, those of the right sum."""
    whole = []
    taken = taken or [[t.reducer.take() for t in replica] for replica in replicas]
    for replica, sums in zip(replicas, taken, strict=True):
        for s, trainer in zip(sums, replica, strict=True):
            finish(made, s[:-1], None, trainer.rank.width)
        whole.append([joined([s[b] for s in sums], bucket) for b, bucket in enumerate(values(0))])
    for index, bucket in enumerate(whole[0]):
        for name, total in bucket.items():
            assert all(torch.equal(total, other[index][name]) for other in whole), "the same bits"
            means = [values(r[0].rank.replica)[index][name] * len(r) for r in replicas]
            torch.testing.assert_close(total, sum(means) / made.divisor)
    return whole


def check_shared(
    folder: Path, trainers: list[list[Trainer]], record: CommitRecord, taken: list[list[list[torch.Tensor]]]
) -> None:
    """The ranks of a replay add up, cut, and vote on what those of the job have."""
    widths = [len(replica) for replica in trainers]
    every: list[tuple[SharedLanes, dict[int, list[torch.Tensor]], list[torch.Tensor]]] = []
    for replica, sums in zip(trainers, taken, strict=True):
        for trainer, expected in zip(replica, sums, strict=True):
            rank = trainer.rank
            place = (rank.width, rank.rank, folder, rank.settings, 20.0)
            shared = SharedLanes(rank.lanes, widths, *place)
            also = trainers[:] if not record.ring_widths else [replica]  # of equal width: all are repeated here
            every.append((shared, {r[0].rank.replica: r[rank.rank].trained() for r in also}, expected))
    for shared, given, _ in every:
        shared.give(record, given)
    votes = []
    for number, (shared, given, expected) in enumerate(every):
        found, its = shared.sums(record, given)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), "the same bits"
        votes += its if number < widths[0] else []  # all lanes have an owner in each width
    votes.sort()
    assert digest([each for _, each, _ in votes]) == record.digest
    assert sum(square for _, _, square in votes) ** 0.5 / (record.divisor / max(widths)) == record.norm
    if not record.ring_widths:
        return
    with ThreadPoolExecutor(len(every)) as pool:
        told = [pool.submit(shared.told, record, [{"replica": next(iter(given))}]) for shared, given, _ in every]
    replicas = [{"replica": r} for r in range(len(trainers))]
    assert all(each.result() == replicas for each in told)
    assert len(list(folder.iterdir())) == len(trainers), "what all have read is removed"


def test_a_wait_for_ranks_of_another_width_has_a_deadline(tmp_path: Path) -> None:
    plan = lanes_of(SHAPES, 2, 0)
    shared = SharedLanes(plan, (2, 1), 2, 0, tmp_path, Settings("tcp"), 0.0)
    both = (Contribution(0, 2, 0, 0, units=2), Contribution(1, 1, 0, 2, width=1))
    record = CommitRecord(1, 0, 7, PREV, (0, 1), 2, both, "", ring_widths=(2, 1))
    shared.give(record, {0: [flat(bucket, 2, 0) for bucket in values(0)]})
    with pytest.raises(Retryable, match=r"^the ranks of another width have not repeated step 7 within 0 s"):
        shared.sums(record, {})


@pytest.mark.parametrize("large", [1, 6, lanes.LARGE], indirect=True)
@pytest.mark.parametrize("widths", [(4, 3), (4, 3, 2), (3, 3)])
async def test_replicas_of_any_width_make_one_record_and_one_gradient(widths, large, tmp_path) -> None:
    """However the rows of a bucket are summed: each run where it lies, the large ones so, or all copied.

    A replay by the ranks of one replica of each width finds the same.
    """
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
        await async_until(lambda: all(t.votes for t in every), "all ranks vote", 30.0)
        first, *others = (record(replica, given) for replica in trainers)
        assert all(other == first for other in others), "digest, norm, weights and losses, to the last bit"
        weights = {c.replica: c.weight for c in first.contributions}
        assert weights == {r: sum(range(1, w + 1)) for r, w in enumerate(widths)}
        taken = [[t.reducer.take() for t in replica] for replica in trainers]
        check_shared(tmp_path, trainers, first, taken)
        counts = [torch.stack([sums[-1] for sums in of_one]).sum(0) for of_one in taken]
        whole = gradients(trainers, first, taken)
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
            trainer.begin(fence)
        for trainer in narrow:
            trainer.train(fence)
        await async_until(lambda: all(t.votes for t in (*wide, *narrow)), "all ranks vote", 30.0)
        made = record(wide, given)
        assert record(narrow, given) == made
        gradients([wide, narrow], made)


async def test_a_chunk_of_a_broken_ring_that_is_added_late_does_not_come_into_the_next_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine may be in the middle of a chunk when the next attempt begins: it writes to the old memory."""
    entered, release = threading.Event(), threading.Event()
    reduce, held = CpuJob._reduce, list[Trainer]()

    def slow(job: CpuJob, place: torch.Tensor, span: Any, part: torch.Tensor | None, kind: OperationKind) -> None:
        if held and not entered.is_set() and part is not None and kind is OperationKind.REDUCE_STORE_SEND:
            out = held[0].reducer._out
            if out is not None and out[1].data_ptr() <= place.data_ptr() < out[1].data_ptr() + out[1].nbytes:
                entered.set()
                release.wait(30.0)
        reduce(job, place, span, part, kind)

    monkeypatch.setattr(CpuJob, "_reduce", slow)
    async with WideRing((4, 3)) as ring:
        trainers = [[Trainer(rank) for rank in ranks] for ranks in ring.replicas]
        every = [trainer for replica in trainers for trainer in replica]
        held.append(trainers[1][0])
        given = ring.grant(1)
        for trainer in every:
            trainer.reducer.configure(given)
        try:
            await ring.form(1)
            for trainer in every:
                trainer.train(AttemptId(1, 1, 0))
            await async_until(entered.is_set, "an engine is in the middle of a chunk", 30.0)
            for trainer in every:  # as `train.orders` does it
                trainer.reducer.cancel()
                trainer.rank.group.stop(1, "a lane broke")
            given = ring.grant(2)
            for trainer in every:
                trainer.reducer.configure(given)
                trainer.rank.group.configure(given)
                trainer.begin(AttemptId(2, 1, 0))
        finally:
            release.set()
        await async_until(
            lambda: all(t.votes and t.votes[-1].fence.epoch == 2 for t in every), "all vote again", 30.0
        )
        first, second = (record(replica, given) for replica in trainers)
        assert first == second
        gradients(trainers, first)


class ByHand:
    """A group whose all-reduces end when the test says so."""

    transports = ("tcp", "tcp")

    def __init__(self, group: Any) -> None:
        self.arena, self.asked = group.arena, list[tuple[Any, Any, Future[AllReduceResult]]]()
        self.sent: list[Any] = []

    def all_reduce(
        self,
        key: Any,
        local: Any,
        out: Any,
        mine: Any,
        after: Any = None,
        lane: int | None = None,
        wire: Any = None,
    ) -> Future[AllReduceResult]:
        self.sent.append(local)
        work: Future[AllReduceResult] = Future()
        self.asked.append((out, mine, work))
        return work

    def asked_for(self) -> list[tuple[Any, Any, Future[AllReduceResult]]]:
        """The all-reduces since the last call."""
        asked, self.asked = self.asked, []
        return asked

    @staticmethod
    def end(asked: list[tuple[Any, Any, Future[AllReduceResult]]]) -> None:
        """Let them end: what was given is the sum."""
        for out, mine, work in asked:
            work.set_result(AllReduceResult(out, (mine() if callable(mine) else mine,), 0))

    def crashed(self, message: str, error: Exception) -> None:
        raise AssertionError(message) from error


def memory(asked: list[tuple[Any, Any, Any]]) -> set[int]:
    return {piece.data_ptr() for out, _, _ in asked for piece in pieced(out).pieces if piece.numel()}


@pytest.mark.parametrize("large", [1, lanes.LARGE], indirect=True)
async def test_memory_is_reused_only_after_all_works_that_use_it_have_ended(large, monkeypatch) -> None:
    async with WideRing((4, 3)) as ring:
        group = ByHand(ring.replicas[1][0].group)
        trainer = Trainer(ring.replicas[1][0], group)
        trainer.reducer.configure(ring.grant(1))
        trainer.train(AttemptId(1, 1, 0))
        broken = group.asked_for()
        group.end(broken[:-1])  # the last one is still written to
        trainer.reducer.cancel()
        trainer.begin(AttemptId(2, 1, 0))
        again = group.asked_for()
        assert not memory(again) & memory(broken)
        group.end(broken[-1:])
        assert not trainer.votes
        group.end(again)
        assert [vote.fence for vote in trainer.votes] == [AttemptId(2, 1, 0)]
        trainer.reducer.cancel()  # the step is in doubt: its sums stay
        sums = trainer.reducer.take()
        ends = {out.data_ptr() for out in sums if out.numel()}
        trainer.reducer.give_back(sums)
        trainer.train(AttemptId(3, 2, 0))
        third = group.asked_for()
        assert memory(third) == memory(again), "an attempt that ended costs no new memory"
        scatter, late = LanePlan.scatter, list[bool]()

        def cancelled(plan: LanePlan, results: Any, out: Any) -> None:
            """The ring breaks, and the next attempt begins, while the sums are put where they belong."""
            if late:
                return scatter(plan, results, out)
            trainer.reducer.cancel()
            trainer.begin(AttemptId(4, 2, 0))
            late.append(bool(memory(group.asked) & (memory(third) | ends)))
            return scatter(plan, results, out)

        monkeypatch.setattr(LanePlan, "scatter", cancelled)
        group.end(third)
        assert late == [False]


async def test_equal_widths_use_the_same_memory_again_after_an_attempt_broke() -> None:
    """Their gradient itself is sent, and the engine writes no sum before older rings are gone."""
    async with WideRing((3, 3)) as ring:
        group = ByHand(ring.replicas[0][0].group)
        trainer = Trainer(ring.replicas[0][0], group)
        trainer.reducer.configure(ring.grant(1))
        *trained, _ = trainer.train(AttemptId(1, 1, 0))
        assert {id(gradient) for gradient in trained} <= {id(sent) for sent in group.sent}
        broken = group.asked_for()
        trainer.reducer.cancel()
        trainer.begin(AttemptId(2, 1, 0))
        assert memory(group.asked_for()) == memory(broken)


def test_owners_of_a_lane_compare_the_same_bytes_of_the_state() -> None:
    """Sixteen slices cover each lane; a byte that differs shows in one of them, whoever has another width."""
    shapes = [shape for bucket in SHAPES for _, shape in bucket] * 2
    whole = [t for bucket in values(3) for t in bucket.values()] * 2
    steps = torch.tensor([7.0])  # every rank has it whole

    def digests(width: int, rank: int, step: int, tensors: list[torch.Tensor]) -> dict[int, str]:
        plan = lanes_of(SHAPES, width, rank).plan((4, 3))
        shards = []
        for tensor in tensors:
            chunk = -(-len(tensor) // width)
            shards.append(tensor[rank * chunk : (rank + 1) * chunk].contiguous())
        nbytes = [(shard.numel() * 4, 4) for shard in [*shards, steps]]
        mine = live_state.lane_pieces(plan, [*shapes, None], nbytes, width, rank)
        held = [as_bytes(shard) for shard in [*shards, steps]]
        each = [live_state.lane_digest(step, pieces, held, b"") for pieces in mine]
        return dict(zip((lane.ring.number for lane in plan.lanes), each, strict=True))

    def of_replica(width: int, step: int, tensors: list[torch.Tensor]) -> dict[int, str]:
        return {n: d for rank in range(width) for n, d in digests(width, rank, step, tensors).items()}

    for step in range(16):
        assert of_replica(4, step, whole) == of_replica(3, step, whole)
    damaged = [t.clone() for t in whole]
    damaged[3][17, 4] += 1.0
    differ = [step for step in range(16) if of_replica(4, step, damaged) != of_replica(3, step, whole)]
    assert len(differ) == 1
