import math
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_hsdp.config import Config, parse
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import AttemptId, Contribution, Vote
from ft_hsdp.core.effects import Reduce
from ft_hsdp.core.grant import Role
from ft_hsdp.core.units import Places
from ft_hsdp.errors import PeerDead
from ft_hsdp.ftar.allreduce import AllReduceResult
from ft_hsdp.ftar.connections import LaneRing
from ft_hsdp.ftar.frame import Entry, Key
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.train import gradients as reducing
from ft_hsdp.train.gradients import Feeding, Reducer
from ft_hsdp.train.lanes import GradientLanes, LanePlan, one_lane, wires
from ft_hsdp.train.votes import checksum, contributions, judged, look, square_of
from tests.support.train.meter import Meter

SIZES = (3, 5, 2)
LANES = GradientLanes(None, one_lane(LaneRing(1, "layout"), SIZES), 2, 1)
PREV = "ab" * 16
MINE = (Contribution(0, 1, 0, 7, 1.5),)
OTHER = Entry(1, (Contribution(1, 1, 1, 40, 2.0),))


class Op:
    def __init__(
        self,
        key: Key,
        local: torch.Tensor | None,
        out: torch.Tensor,
        mine: Entry | Callable[[], Entry],
        after: object = None,
        lane: int | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        self.key, self.local, self.out, self.wire = key, local, out, wire
        self.mine = mine() if callable(mine) else mine
        assert after is None  # tensors on the CPU are complete
        assert lane in (None, 1)
        self.work: Future[AllReduceResult] = Future()

    def end(self, *others: Entry) -> None:
        """It ends well: replica 1 adds ones."""
        self.out.copy_((0 if self.local is None else self.local) + torch.ones_like(self.out))
        self.work.set_result(AllReduceResult(self.out, (self.mine, *(others or (OTHER,))), 100))


class Group:
    """Takes all-reduces; ``at_once`` ends them before the caller has the work in hand."""

    def __init__(self, at_once: bool = False) -> None:
        self.ops: list[Op] = []
        self.transports = ("tcp", "tcp")
        self.arena = Arena()
        self._at_once = at_once

    def all_reduce(self, *args: Any) -> Future[AllReduceResult]:
        op = Op(*args)
        self.ops.append(op)
        if self._at_once:
            op.end()
        return op.work


class Scene:
    def __init__(self, at_once: bool = False) -> None:
        self.group, self.votes, self.checked = Group(at_once), list[Vote](), list[str]()
        self.meter = Meter()
        group: Any = self.group
        meter: Any = self.meter
        self.reducer = Reducer(group, LANES, 0, 1, self.votes.append, checked=self._check, meter=meter)

    def _check(self, prev: str, plan: LanePlan) -> list[str]:
        self.checked.append(prev)
        return ["of the state"] * len(plan.lanes)

    def begin(
        self,
        step: int = 1,
        epoch: int = 1,
        attempt: int = 0,
        role: Role = "contribute",
        places: Places = ((0, 1),),
    ) -> AttemptId:
        fence = AttemptId(epoch, step, attempt)
        self.reducer.begin(Reduce(fence, role, PREV, places))
        return fence

    def open(self, step: int = 1) -> None:
        self.reducer.open(Feeding(step))

    def ready(self, *buckets: int, scale: float = 1.0) -> dict[int, torch.Tensor]:
        flats = {b: torch.arange(SIZES[b], dtype=torch.float32) * scale + b for b in buckets}
        for b, flat in flats.items():
            self.reducer.ready(b, flat, MINE, lambda: 1.5)
        return flats

    def fed(self) -> AttemptId:
        """An attempt begins, and all buckets are there."""
        fence = self.begin()
        self.open()
        self.ready(0, 1, 2)
        return fence

    def end(self, first: int = 0, stop: int | None = None) -> None:
        """The all-reduces of a span end well."""
        for op in self.group.ops[first:stop]:
            op.end()

    @property
    def buckets(self) -> list[int]:
        return [op.key.bucket for op in self.group.ops]


@pytest.fixture
def s() -> Scene:
    return Scene()


def test_the_ring_is_in_use_from_the_first_bucket_to_the_last_one_or_to_the_break(s: Scene) -> None:
    s.begin()
    s.open()
    s.ready(1)
    assert s.meter.told == []
    s.ready(0)
    assert s.meter.told == ["begin"]
    s.reducer.cancel()
    assert s.meter.told == ["begin", "end"]
    s.begin(attempt=1)
    s.begin(attempt=2)
    assert s.meter.told == ["begin", "end"] * 2 + ["begin"]
    s.ready(2)
    s.end(-3)
    assert s.meter.told == ["begin", "end"] * 3


def test_a_replica_alone_has_no_ring(s: Scene) -> None:
    s.group.transports = ()  # type: ignore[assignment]
    s.fed()
    assert s.meter.told == []


def test_a_bucket_goes_as_soon_as_it_and_all_before_it_are_there(s: Scene) -> None:
    fence = s.begin()
    s.open()
    assert s.buckets == []
    flats = s.ready(1)
    assert s.buckets == []
    flats |= s.ready(0)
    assert s.buckets == [0, 1]
    flats |= s.ready(2)
    assert s.buckets == [0, 1, 2]
    for b, op in enumerate(s.group.ops):
        assert op.key == Key(fence.epoch, fence.step, fence.attempt, b, PREV)
        assert op.local is flats[b]
        assert (op.out.shape, op.out.data_ptr() == op.local.data_ptr()) == (op.local.shape, False)
        assert replace(op.mine, square=0.0) == Entry(0, MINE)


class Clock:
    """Monotonic seconds that pass when told."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(reducing.time, "monotonic", lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_only_gradients_that_are_here_wait_for_an_order(monkeypatch) -> None:
    s, clock = Scene(), Clock(monkeypatch)
    for step, asked in ((1, 0.0), (2, 0.75)):  # the order before the first bucket, and after it
        s.open(step)
        clock.wait(5)
        if not asked:
            s.begin(step)
        s.ready(1)
        clock.wait(1)
        s.ready(0)
        clock.wait(asked)
        if asked:
            s.begin(step)
        clock.wait(2)
        s.ready(2)
        s.end(-3)
        assert s.reducer.traffic.held_up == asked
        s.reducer.open(None)
        clock.wait(3)


def test_what_does_not_count_in_the_norm_is_left_out() -> None:
    shards = [torch.arange(4.0), torch.arange(3.0), torch.full((2,), 100.0)]
    for counted, expected in (([((0, 2), (3, 4)), ()], 1 + 9), ([((0, 4),), ((1, 3),)], 14 + 5)):
        (lane,) = one_lane(LaneRing(1, "layout"), (4, 3, 2), counted).lanes
        numbers = [look(part, [shard], None)() for part, shard in zip(lane.parts, shards, strict=True)]
        assert judged(numbers)[1] == pytest.approx(expected)


def test_the_vote_is_about_what_was_reduced(s: Scene) -> None:
    fence = s.fed()
    s.end(0, 2)
    assert (s.votes, s.checked) == ([], [])
    s.group.ops[2].end()
    (vote,) = s.votes
    outs = [op.out for op in s.group.ops]
    assert (vote.rank, vote.fence, vote.poisoned) == (1, fence, ())
    (lane,) = vote.sums
    assert (lane.number, lane.owners, lane.state_digest) == (1, (), "of the state")
    assert s.checked == [PREV], "it says what the rank holds before the step"
    assert lane.digest == state_id.digest([checksum(o) for o in outs])
    assert lane.sumsq == pytest.approx(sum(float(o.double().square().sum()) for o in outs))
    assert lane.contributions == (Contribution(0, 1, 0, 7, 1.5), Contribution(1, 1, 1, 40, 2.0))
    assert s.reducer.traffic.bytes_sent == 300
    taken = s.reducer.take()
    assert all(a is b for a, b in zip(taken, outs, strict=True))
    assert checksum(taken[0]) != checksum(taken[0] + 1)


def test_a_retry_goes_over_the_same_local_gradient(s: Scene) -> None:
    s.begin()
    s.open()
    flats = s.ready(0, 1, 2)
    s.group.ops[0].end()
    s.group.ops[1].work.set_exception(PeerDead("gone"))
    s.group.ops[2].work.set_exception(PeerDead("gone"))
    s.reducer.cancel()
    fence = s.begin(epoch=2)
    again = s.group.ops[3:]
    assert [op.key.bucket for op in again] == [0, 1, 2]
    assert {op.key.epoch for op in again} == {2}
    assert all(op.local is flats[op.key.bucket] for op in again)
    for op in again:
        op.end()
    (vote,) = s.votes
    assert vote.fence == fence


@pytest.mark.parametrize("begun", ["before", "after"])
def test_more_units_are_added_to_the_gradient_before_it_goes(begun: str) -> None:
    """A contributor was lost: the order asks for two units, and one is trained."""
    s = Scene()
    s.open()
    first = s.ready(0, 1, 2)
    if begun == "before":
        s.begin()
        assert s.buckets == [0, 1, 2]
        s.reducer.cancel()
    s.begin(epoch=2, places=((0, 2),))
    sent = s.group.ops[:]
    more = (*MINE, Contribution(0, 1, 0, 8, 1.5, part=1))
    second = {b: flat * 3 + 1 for b, flat in first.items()}
    for b in (1, 0, 2):
        s.reducer.ready(b, second[b], more, lambda: 1.5)
    again = s.group.ops[len(sent) :]
    assert [op.key.bucket for op in again] == [0, 1, 2]
    for op in again:
        assert op.mine.contributions == more
        assert op.local is not None
        assert torch.equal(op.local, first[op.key.bucket] + second[op.key.bucket])
    assert all(op.local is first[op.key.bucket] for op in sent), "a neighbour may still read it"


def test_an_order_for_fewer_units_takes_the_part_that_has_them() -> None:
    """Not the newest: another rank, or another bucket, may not have that yet."""
    s = Scene()
    s.open()
    first = s.ready(0, 1, 2)
    more = (*MINE, Contribution(0, 1, 0, 8, 1.5, part=1))
    s.reducer.ready(0, torch.ones(SIZES[0]), more, lambda: 1.5)
    s.begin(epoch=3, places=((0, 1),))
    assert [op.mine.contributions for op in s.group.ops] == [MINE] * 3
    assert all(op.local is first[op.key.bucket] for op in s.group.ops)
    s.reducer.cancel()
    s.begin(epoch=4, places=((0, 2),))
    assert [op.mine.contributions for op in s.group.ops[3:]] == [more], "the other buckets are not there yet"


def test_a_replica_that_cannot_train_all_that_is_asked_for_brings_what_it_can() -> None:
    s = Scene()
    s.reducer.open(Feeding(1, lambda places: 1))
    s.ready(0, 1, 2)
    s.begin(places=((0, 5),))
    assert s.buckets == [0, 1, 2]


def test_what_is_trained_beyond_the_order_counts_too() -> None:
    s = Scene()
    s.open()
    more = (replace(MINE[0], units=3, weight=3),)
    for b in range(3):
        s.reducer.ready(b, torch.ones(SIZES[b]), more, lambda: 1.5)
    s.begin(places=((0, 2),))
    assert [op.mine.contributions for op in s.group.ops] == [more] * 3


def test_works_of_an_attempt_that_is_over_count_for_nothing(s: Scene) -> None:
    s.fed()
    s.group.ops[0].end()
    s.begin(attempt=1)
    for op in s.group.ops[1:4]:  # two of the attempt before, and one of this one
        op.end()
    s.reducer.cancel()
    s.group.ops[4].end()
    assert s.votes == []
    s.begin(attempt=2)
    s.end(6)
    assert [v.fence.attempt for v in s.votes] == [2]


def test_a_relay_needs_no_gradient_and_has_weight_0(s: Scene) -> None:
    s.begin(role="behind")
    assert s.buckets == [0, 1, 2]
    assert all(op.local is None and op.mine.weight == 0 and not op.mine.poisoned for op in s.group.ops)
    s.end()
    assert [c.replica for c in s.votes[0].sums[0].contributions] == [1]


@pytest.mark.parametrize("step", [1, 3])
def test_gradients_of_another_step_are_not_taken(s: Scene, step: int) -> None:
    s.open(step=step)
    s.ready(0, 1, 2)
    s.begin(step=2)
    assert s.buckets == []
    s.open(step=2)
    assert s.buckets == [], "the old gradient was taken for the new batch"
    s.ready(0, scale=5.0)
    assert s.buckets == [0]


def test_what_comes_while_nothing_is_fed_is_dropped(s: Scene) -> None:
    s.open()
    s.reducer.open(None)
    s.ready(0, 1, 2)
    s.begin()
    assert s.buckets == []


def test_gradients_travel_as_the_configuration_says_and_the_rest_as_it_is() -> None:
    model: Any = SimpleNamespace(gradients=2, sizes=SIZES)
    narrow = parse({"ftar": {"dtype": "bfloat16"}})
    assert (*wires(Config(), model), *wires(narrow, model)) == (None,) * 3 + (torch.bfloat16,) * 2 + (None,)
    group: Any = Group()
    reducer = Reducer(group, LANES, 0, 1, lambda vote: None, _wires=wires(narrow, model))
    reducer.begin(Reduce(AttemptId(1, 1, 0), "behind", PREV, ()))
    assert [op.wire for op in group.ops] == [torch.bfloat16, torch.bfloat16, None]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e15, 0.0])
def test_a_gradient_that_is_not_finite_is_flagged(s: Scene, bad: float) -> None:
    s.begin()
    s.open()
    s.ready(0, 2)
    s.reducer.ready(1, torch.full((5,), bad), MINE, lambda: 1.5)
    expected = not math.isfinite(bad)
    assert [op.mine.poisoned for op in s.group.ops] == [False, expected, False]
    s.end()
    assert s.votes[0].poisoned == ((0,) if expected else ())


@pytest.mark.parametrize(
    ("norm", "expected"),
    [(1e18, True), (1.8e19, True), (1.9e19, False), (1e30, False), (math.inf, False), (math.nan, False)],
)
def test_a_gradient_is_usable_while_its_squares_are_finite_in_fp32(norm: float, expected: bool) -> None:
    """However the norm is computed: in one piece, or as the sum of many small squares."""
    many = torch.full((4096,), norm / 64)
    for flat in (torch.tensor([0.0, norm]), many):
        square = square_of(flat)()
        assert Entry(0, (), square).poisoned is not expected
        assert square == pytest.approx(norm**2) or not expected
    assert not expected or bool(torch.isfinite(many * many).all())


def test_the_poison_of_others_is_in_the_vote(s: Scene) -> None:
    s.fed()
    s.end(0, 2)
    s.group.ops[2].end(replace(OTHER, square=math.nan), Entry(4, (Contribution(4, 1, 4, 0),), math.inf))
    assert s.votes[0].poisoned == (1, 4)


def test_a_vote_says_the_squares_of_all_gradients_that_are_finite(s: Scene) -> None:
    s.fed()
    s.end(2)
    s.group.ops[1].end(replace(OTHER, square=2.0), replace(OTHER, replica=2, square=math.nan), Entry(3))
    s.group.ops[0].end(replace(OTHER, square=0.5), replace(OTHER, replica=2, square=1.0), Entry(3))
    mine = sum(float((op.local**2).sum()) for op in s.group.ops if op.local is not None)
    assert s.votes[0].squares == ((0, pytest.approx(mine)), (1, 2.5), (3, 0.0))


def test_a_work_that_is_done_before_its_callback_is_set() -> None:
    """Then the callback runs under the lock of the submitter."""
    s = Scene(at_once=True)
    s.open()

    def body() -> None:
        s.ready(0, 1, 2)
        s.begin()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for itself"
    assert len(s.votes) == 1


def test_a_bucket_of_another_size_is_a_programmers_error(s: Scene) -> None:
    s.open()
    with pytest.raises(ValueError, match="bucket 1 has 4 elements, planned 5"):
        s.reducer.ready(1, torch.zeros(4), MINE, lambda: 1.5)


def test_buckets_that_disagree_have_no_contributors() -> None:
    one = (Entry(0, (Contribution(0, 1, 0, 7, 1.0),)), OTHER)
    for other in ((Entry(0, (Contribution(0, 1, 0, 8, 1.0),)), OTHER), (Entry(0), OTHER), (OTHER,)):
        assert contributions([one, other]) == ()
    swapped = (OTHER, Entry(0, (Contribution(0, 1, 0, 7, 3.0),)))
    got = contributions([one, swapped])
    assert got == (Contribution(0, 1, 0, 7, 3.0), Contribution(1, 1, 1, 40, 2.0)), "losses are the last bucket's"


def test_sums_are_on_the_device() -> None:
    group = Group()
    meta = torch.device("meta")
    reducer = Reducer(group, LANES, 0, 1, lambda vote: None, meta)  # type: ignore[arg-type]
    reducer.begin(Reduce(AttemptId(1, 1, 0), "behind", PREV))
    assert [(op.out.device, op.out.numel()) for op in group.ops] == [(meta, n) for n in SIZES]


def test_the_memory_of_the_sums_is_there_before_the_first_attempt() -> None:
    class Counting(Arena):
        made = 0

        def empty(self, *arguments: Any) -> torch.Tensor:
            self.made += 1
            return super().empty(*arguments)

    group = Group()
    group.arena = arena = Counting()
    reducer = Reducer(group, LANES, 0, 1, lambda vote: None)  # type: ignore[arg-type]
    assert arena.made == len(SIZES)
    for step in (1, 2):
        reducer.begin(Reduce(AttemptId(1, step, 0), "behind", PREV))
        reducer.give_back(reducer.take())
    assert len(group.ops) == 2 * len(SIZES)
    assert arena.made == len(SIZES)
    taken = []
    for step in (3, 4):  # of a replica that is behind
        reducer.begin(Reduce(AttemptId(1, step, 0), "behind", PREV))
        taken.append(reducer.take())
    group.ops.clear()
    gone = weakref.ref(taken[0][0])
    while taken:
        reducer.give_back(taken.pop(0))
    assert gone() is None
