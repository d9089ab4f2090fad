from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.ring import RingPlan, Span, shards

plans = st.builds(
    RingPlan,
    elements=st.one_of(st.integers(0, 40), st.integers(0, 600)),
    members=st.integers(1, 16),
    chunk=st.one_of(st.integers(1, 5), st.integers(1, 97)),
    slots=st.integers(1, 9),
)


def test_the_first_shards_take_the_remainder() -> None:
    assert shards(10, 4) == (Span(0, 3), Span(3, 6), Span(6, 8), Span(8, 10))


def test_fewer_elements_than_members_leave_empty_shards() -> None:
    assert [s.size for s in shards(2, 5)] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(("elements", "members"), [(10, 0), (10, -1), (-1, 2)])
def test_impossible_cuts_are_refused(elements: int, members: int) -> None:
    with pytest.raises(ValueError, match=f"cannot cut {elements} elements for {members} members"):
        shards(elements, members)


@given(st.integers(0, 5000), st.integers(1, 64))
def test_shards_cover_every_element_once(elements: int, members: int) -> None:
    cut = shards(elements, members)
    assert len(cut) == members
    assert max(s.size for s in cut) - min(s.size for s in cut) <= 1
    assert (cut[0].start, cut[-1].stop) == (0, elements)
    assert all(a.stop == b.start for a, b in itertools.pairwise(cut))


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


@pytest.mark.parametrize("members", range(1, 17))
def test_an_empty_message_is_one_empty_round(members: int) -> None:
    plan = RingPlan(0, members, 4, 3)
    assert (plan.partitions, plan.rounds) == (1, 1)
    assert {plan.span(s, 0) for s in range(members)} == {Span(0, 0)}


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
        first = round_ // plan.slots * plan.partition
        for shard in range(plan.members):
            span = plan.span(shard, round_)
            assert first <= span.start <= span.stop <= min(first + plan.partition, plan.elements)


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
def test_a_round_behind_the_last_partition_is_refused(plan: RingPlan) -> None:
    with pytest.raises(ValueError, match="is not in"):
        plan.span(0, plan.partitions * plan.slots)
