from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.ring import (
    OperationKind,
    OutOfOrder,
    Pipeline,
    ProcessChunk,
    RingPlan,
    SendChunk,
    Step,
    fold_order,
)

Sum = tuple[int, ...]  # who was added, in order
Chunk = tuple[int, int]  # operation of the receiver, round


@dataclass
class Parcel:
    """A chunk on its way: what it holds, or None if it is an empty one."""

    number: int
    round: int
    value: Sum | None


class Member:
    """A pipeline with a plane that adds names instead of numbers, and a window to the right neighbour."""

    def __init__(self, plan: RingPlan, position: int, contributes: bool, depth: int) -> None:
        self.pipeline = Pipeline(plan, position, contributes, depth)
        self._mine: Sum = (position,) if contributes else ()
        self._depth = depth
        self._plan = plan
        self.inbox: deque[Parcel] = deque()
        self.queue: deque[Parcel] = deque()
        self.unanswered = 0
        self.most = 0
        self.held: dict[tuple[int, int], Sum] = {}
        self.sent: list[Chunk] = []
        self.busy: list[tuple[ProcessChunk, Sum | None]] = []
        self._arrived: dict[Chunk, Sum | None] = {}

    def start(self) -> None:
        self._take(self.pipeline.start())

    def receive(self) -> None:
        parcel = self.inbox.popleft()
        self._arrived[parcel.number, parcel.round] = parcel.value
        self._take(self.pipeline.arrived(parcel.number, parcel.round, parcel.value is None))

    def complete(self, number: int) -> bool:
        """The plane is done with the oldest chunk of that operation; whether it came from the left neighbour."""
        process, value = next(b for b in self.busy if b[0].operation.number == number)
        self.busy.remove((process, value))
        for step in self.pipeline.processed(number):
            if isinstance(step, ProcessChunk):
                self._take([step])
                continue
            assert (step.operation, step.round) == (process.operation, process.round)
            out = None if step.empty else value or ()
            assert step.empty == (
                not value and step.operation.kind in (OperationKind.COPY_SEND, OperationKind.REDUCE_SEND)
            )
            self.sent.append((number + 1, step.round))
            self.queue.append(Parcel(number + 1, step.round, out))
        if process.operation.kind not in (OperationKind.COPY_SEND, OperationKind.REDUCE_SEND):
            assert (process.operation.shard, process.round) not in self.held, "stored twice"
            self.held[process.operation.shard, process.round] = value or ()
        return process.operation.kind.receives and self._plan.members > 1

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            assert isinstance(step, ProcessChunk), "nothing is sent before the plane has made it"
            kind, chunk = step.operation.kind, (step.operation.number, step.round)
            alone = self._plan.members == 1
            got = () if kind is OperationKind.COPY_SEND or alone else self._arrived.pop(chunk)
            assert step.empty == (
                got is None or (got == () == self._mine and (kind is OperationKind.COPY_SEND or alone))
            )
            added = self._mine if kind.reduces or kind is OperationKind.COPY_SEND or alone else ()
            self.busy.append((step, (got or ()) + added))
            assert len(self.busy) <= self._depth

    def check(self) -> None:
        """The invariants that hold at any time."""
        counters = self.pipeline.counters
        for counter in counters:
            assert 0 <= counter.done <= counter.posted <= counter.ready <= self._plan.rounds
        if len(counters) > 1:
            assert counters[0].ready - counters[1].ready <= self._plan.slots, "ahead of the ring"


def run(plan: RingPlan, contributors: frozenset[int], depth: int, chance: random.Random) -> list[Member]:
    """A ring until nothing can happen any more: arrivals, ends of chunks and answers in any order."""
    members = [Member(plan, p, p in contributors, depth) for p in range(plan.members)]
    unstarted = set(range(plan.members))
    while True:
        able: list[tuple[str, int, int]] = [("start", p, 0) for p in unstarted]
        for p, member in enumerate(members):
            if member.inbox and p not in unstarted:
                able.append(("receive", p, 0))
            able += [("complete", p, n) for n in sorted({b[0].operation.number for b in member.busy})]
            if member.queue and member.unanswered < plan.slots:
                able.append(("send", p, 0))
        if not able:
            return members
        what, p, number = chance.choice(able)
        member, left = members[p], members[p - 1]
        if what == "start":
            unstarted.discard(p)
            member.start()
        elif what == "receive":
            member.receive()
        elif what == "send":
            member.unanswered += 1
            members[(p + 1) % plan.members].inbox.append(member.queue.popleft())
        elif member.complete(number):
            left.unanswered -= 1
        member.check()


def check_outcome(plan: RingPlan, contributors: frozenset[int], members: list[Member]) -> None:
    rounds, n = plan.rounds, plan.members
    for member in members:
        assert member.pipeline.finished
        assert not member.queue
        assert not member.inbox
        assert sorted(member.sent) == [(k, r) for k in range(1, 2 * n - 1) for r in range(rounds)]
        assert member.held == {
            (s, r): fold_order(s, range(n), contributors) for s in range(n) for r in range(rounds)
        }


plans = st.builds(
    RingPlan,
    elements=st.one_of(st.integers(0, 20), st.integers(0, 60)),
    members=st.integers(1, 16),
    chunk=st.integers(1, 4),
    slots=st.integers(1, 4),
)


@given(plans, st.data(), st.integers(0, 2**32))
def test_any_order_of_events_ends_with_the_sum(plan: RingPlan, data: st.DataObject, seed: int) -> None:
    """Any message, any relays, a plane of any depth up to the slots: it ends, in one way only."""
    contributors = frozenset(data.draw(st.sets(st.integers(0, plan.members - 1))))
    depth = data.draw(st.integers(1, plan.slots))
    check_outcome(plan, contributors, run(plan, contributors, depth, random.Random(seed)))


@pytest.mark.parametrize("members", range(1, 17))
@pytest.mark.parametrize("relays", ["none", "odd", "all"])
def test_each_size_of_ring(members: int, relays: str) -> None:
    out = {"none": (), "odd": range(1, members, 2), "all": range(members)}[relays]
    contributors = frozenset(range(members)) - frozenset(out)
    for elements in (members - 1, 4 * members + 3):
        plan = RingPlan(elements, members, 2, 3)
        check_outcome(plan, contributors, run(plan, contributors, 2, random.Random(elements)))


def test_the_chunk_nearest_to_its_end_goes_first() -> None:
    pipeline = Pipeline(RingPlan(24, 2, 3, 4), 0, True)
    (first,) = pipeline.start()
    assert (first.operation.number, first.round) == (0, 0)
    for round_ in range(2):
        assert pipeline.arrived(1, round_, False) == []
    assert pipeline.arrived(2, 0, False) == []
    sent, then = pipeline.processed(0)
    assert isinstance(sent, SendChunk)
    assert (then.operation.number, then.round) == (2, 0)
    assert [s.operation.number for s in pipeline.processed(2)] == [1]


def test_own_chunks_wait_for_the_ring() -> None:
    """No more first chunks than slots, until the left neighbour's first ones come."""
    pipeline = Pipeline(RingPlan(60, 2, 3, 2), 0, True, depth=100)
    assert len(pipeline.start()) == 2
    for number in (0, 0):
        assert [type(s) for s in pipeline.processed(number)] == [SendChunk]
    steps = pipeline.arrived(1, 0, False)
    assert sorted((s.operation.number, s.round) for s in steps) == [(0, 2), (1, 0)]


@pytest.mark.parametrize(
    ("number", "round_", "empty"),
    [
        (0, 0, False),  # nothing is received there
        (5, 0, False),  # behind the last operation
        (1, 1, False),  # not the next one
        (1, 4, False),  # not in the plan
        (3, 0, True),  # a final sum is never empty
        (4, 0, True),
    ],
)
def test_what_is_not_next_is_refused(number: int, round_: int, empty: bool) -> None:
    pipeline = Pipeline(RingPlan(36, 3, 3, 2), 1, True)
    pipeline.start()
    before = [(c.ready, c.posted, c.done) for c in pipeline.counters]
    with pytest.raises(OutOfOrder):
        pipeline.arrived(number, round_, empty)
    assert [(c.ready, c.posted, c.done) for c in pipeline.counters] == before


def test_a_chunk_comes_once_only() -> None:
    pipeline = Pipeline(RingPlan(6, 2, 3, 2), 0, True)
    pipeline.start()
    pipeline.arrived(1, 0, False)
    with pytest.raises(OutOfOrder, match="got round 0 of 1, next is 1"):
        pipeline.arrived(1, 0, False)
    with pytest.raises(OutOfOrder, match="got round 1 of 1, next is 1"):
        pipeline.arrived(1, 1, False)


def test_the_plane_cannot_finish_what_it_was_not_given() -> None:
    pipeline = Pipeline(RingPlan(6, 2, 3, 2), 0, True)
    with pytest.raises(OutOfOrder, match="before it was posted"):
        pipeline.processed(1)


@pytest.mark.parametrize("members", range(1, 6))
def test_how_many_chunks_come_from_the_left(members: int) -> None:
    plan = RingPlan(50, members, 2, 2)
    done = run(plan, frozenset(range(members)), 1, random.Random(0))
    assert done[0].pipeline.frames == len(done[members - 1].sent) == plan.rounds * (2 * members - 2)
