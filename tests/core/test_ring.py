import itertools
import random
from collections import deque
from dataclasses import dataclass, replace

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
    Span,
    Step,
    fold_order,
    operations,
    shards,
)

whole = st.builds(
    RingPlan,
    elements=st.one_of(st.integers(0, 40), st.integers(0, 600)),
    members=st.integers(1, 16),
    chunk=st.one_of(st.integers(1, 5), st.integers(1, 97)),
    slots=st.integers(1, 9),
)


@st.composite
def in_pieces(draw: st.DrawFn) -> RingPlan:
    """The plan of a bucket that lies in several pieces."""
    plan = draw(whole)
    found = draw(st.sets(st.integers(1, max(1, plan.elements - 1)), max_size=12))
    return replace(plan, edges=tuple(sorted(e for e in found if e < plan.elements)))


plans = st.one_of(whole, in_pieces())


@pytest.mark.parametrize(("elements", "members"), [(10, 0), (10, -1), (-1, 2)])
def test_impossible_cuts_are_refused(elements: int, members: int) -> None:
    with pytest.raises(ValueError, match=f"cannot cut {elements} elements for {members} members"):
        shards(elements, members)


@pytest.mark.parametrize("wrong", [(-1, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_an_impossible_plan_is_refused(wrong: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="no such plan"):
        RingPlan(*wrong)


def test_a_plan_in_figures() -> None:
    """19 elements, 2 members, chunks of 3, 2 slots: a partition of 12 and one of 7, whose shards are 4 and 3."""
    plan = RingPlan(19, 2, 3, 2)
    assert (plan.partition, plan.partitions, plan.rounds) == (12, 2, 4)
    assert [plan.span(0, r) for r in range(4)] == [Span(0, 3), Span(3, 6), Span(12, 15), Span(15, 16)]
    assert [plan.span(1, r) for r in range(4)] == [Span(6, 9), Span(9, 12), Span(16, 19), Span(19, 19)]
    assert list(plan.shard_spans(1)) == [Span(6, 12), Span(16, 19)]


@given(plans)
def test_every_element_is_in_one_chunk_of_one_shard(plan: RingPlan) -> None:
    seen = [0] * plan.elements
    for shard, round_ in itertools.product(range(plan.members), range(plan.rounds)):
        span = plan.span(shard, round_)
        assert 0 <= span.size <= plan.chunk
        for k in range(span.start, span.stop):
            seen[k] += 1
    assert seen == [1] * plan.elements


@given(plans)
def test_a_partition_is_never_larger_than_what_the_slots_hold(plan: RingPlan) -> None:
    assert plan.partition == plan.chunk * plan.slots * plan.members
    assert (plan.partitions - 1) * plan.partition < max(1, plan.elements) <= plan.partitions * plan.partition
    for round_ in range(plan.rounds):
        spans = [plan.span(shard, round_) for shard in range(plan.members)]
        (number,) = {(span.stop - 1) // plan.partition for span in spans if span.size} or {0}
        first = number * plan.partition
        for span in spans:
            assert first <= span.start <= span.stop <= min(first + plan.partition, plan.elements)
        assert plan.edges or number == round_ // plan.slots


@given(in_pieces())
def test_pieces_change_where_a_chunk_ends_and_not_what_a_shard_has(plan: RingPlan) -> None:
    usual = replace(plan, edges=())
    for shard in range(plan.members):
        assert list(plan.shard_spans(shard)) == list(usual.shard_spans(shard)), "neither the order of addition"
        for round_ in range(plan.rounds):
            span = plan.span(shard, round_)
            assert not any(span.start < edge < span.stop for edge in plan.edges)
    assert usual.rounds <= plan.rounds <= usual.rounds + len(plan.edges)


@pytest.mark.parametrize("edges", [(0,), (10,), (3, 3), (5, 4), (11,), (-1,)])
def test_edges_outside_of_a_bucket_or_out_of_order_are_refused(edges: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no such plan"):
        RingPlan(10, 2, 3, 2, edges)


@given(plans)
def test_no_round_is_without_work(plan: RingPlan) -> None:
    """Round numbers go on through all partitions, so the pipe is drained once only."""
    assert plan.rounds >= 1
    if plan.elements:
        for round_ in range(plan.rounds):
            assert any(plan.span(s, round_).size for s in range(plan.members)), round_


@given(plans)
def test_the_spans_of_a_shard_are_its_chunks_put_together(plan: RingPlan) -> None:
    for shard in range(plan.members):
        elements = [k for s in plan.shard_spans(shard) for k in range(s.start, s.stop)]
        chunks = [plan.span(shard, r) for r in range(plan.rounds)]
        assert elements == [k for c in chunks for k in range(c.start, c.stop)]
        assert len(list(plan.shard_spans(shard))) == plan.partitions


@given(plans)
def test_within_a_partition_shards_differ_by_at_most_one_element(plan: RingPlan) -> None:
    for sizes in zip(*([s.size for s in plan.shard_spans(m)] for m in range(plan.members)), strict=True):
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)


@given(plans)
def test_a_round_that_the_plan_does_not_have_is_refused(plan: RingPlan) -> None:
    for wrong in (-1, plan.rounds):
        with pytest.raises(ValueError, match="is not in"):
            plan.span(0, wrong)


Sum = tuple[int, ...]  # the replicas that were added, in order: concatenation shows what addition hides


def reduced(ring: tuple[int, ...], contributors: frozenset[int]) -> list[dict[int, Sum]]:
    """What each member holds of each shard after the operations alone, all members in step."""
    members = len(ring)
    mine = [(r,) if r in contributors else () for r in ring]
    held: list[dict[int, Sum]] = [{} for _ in ring]
    table = [operations(p, members) for p in range(members)]
    wire: list[Sum] = [()] * members
    for number in range(len(table[0])):
        sent: list[Sum] = []
        for p in range(members):
            operation, got = table[p][number], wire[(p - 1) % members]
            if operation.kind is OperationKind.COPY_SEND or members == 1:
                value = mine[p]
            else:
                value = got + mine[p] if operation.kind.reduces else got
            if operation.kind in (OperationKind.REDUCE_STORE_SEND, OperationKind.STORE_SEND, OperationKind.STORE):
                assert operation.shard not in held[p], "a final sum is stored once"
                held[p][operation.shard] = value
            sent.append(value)
        wire = sent
    return held


@pytest.mark.parametrize("members", range(1, 17))
def test_every_member_ends_with_every_gradient_added_once_in_the_agreed_order(members: int) -> None:
    ring = tuple(range(100, 100 + members))
    for contributors in (frozenset(ring), frozenset(ring[::2]), frozenset(ring[1:2]), frozenset[int]()):
        expected = {shard: fold_order(shard, ring, contributors) for shard in range(members)}
        assert all(sorted(order) == sorted(contributors) for order in expected.values())
        assert all(held == expected for held in reduced(ring, contributors))


@pytest.mark.parametrize(("position", "members"), [(3, 3), (-1, 3), (0, 0)])
def test_a_position_outside_the_ring_is_refused(position: int, members: int) -> None:
    with pytest.raises(ValueError, match=f"position {position} is not in a ring of {members}"):
        operations(position, members)


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
        return process.operation.kind is not OperationKind.COPY_SEND and self._plan.members > 1

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
        assert member.pipeline.frames == rounds * (2 * n - 2), "so many come from the left"
        assert sorted(member.sent) == [(k, r) for k in range(1, 2 * n - 1) for r in range(rounds)]
        assert member.held == {
            (s, r): fold_order(s, range(n), contributors) for s in range(n) for r in range(rounds)
        }


ring_plans = st.builds(
    RingPlan,
    elements=st.one_of(st.integers(0, 20), st.integers(0, 60)),
    members=st.integers(1, 16),
    chunk=st.integers(1, 4),
    slots=st.integers(1, 4),
)


@given(ring_plans, st.data(), st.integers(0, 2**32))
def test_any_order_of_events_ends_with_the_sum(plan: RingPlan, data: st.DataObject, seed: int) -> None:
    """Any message, any relays, a plane of any depth up to the slots: it ends, in one way only."""
    contributors = frozenset(data.draw(st.sets(st.integers(0, plan.members - 1))))
    depth = data.draw(st.integers(1, plan.slots))
    check_outcome(plan, contributors, run(plan, contributors, depth, random.Random(seed)))


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


def test_the_plane_cannot_finish_what_it_was_not_given() -> None:
    pipeline = Pipeline(RingPlan(6, 2, 3, 2), 0, True)
    with pytest.raises(OutOfOrder, match="before it was posted"):
        pipeline.processed(1)
