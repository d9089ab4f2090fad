from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.partition import Span, chunks, shards


def test_the_first_shards_take_the_remainder() -> None:
    assert shards(10, 4) == (Span(0, 3), Span(3, 6), Span(6, 8), Span(8, 10))


def test_fewer_elements_than_members_leave_empty_shards() -> None:
    assert [s.size for s in shards(2, 5)] == [1, 1, 0, 0, 0]


def test_an_empty_shard_is_one_empty_chunk() -> None:
    assert chunks(Span(7, 7), 4) == (Span(7, 7),)


def test_the_last_chunk_is_the_short_one() -> None:
    assert chunks(Span(5, 15), 4) == (Span(5, 9), Span(9, 13), Span(13, 15))


@pytest.mark.parametrize(("elements", "members"), [(10, 0), (10, -1), (-1, 2)])
def test_impossible_cuts_are_refused(elements: int, members: int) -> None:
    with pytest.raises(ValueError, match=f"cannot cut {elements} elements for {members} members"):
        shards(elements, members)


@pytest.mark.parametrize("size", [0, -4])
def test_an_impossible_chunk_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1, got {size}"):
        chunks(Span(0, 8), size)


@given(st.integers(0, 5000), st.integers(1, 64), st.integers(1, 97))
def test_the_plan_covers_every_element_once(elements: int, members: int, chunk: int) -> None:
    cut = shards(elements, members)
    assert len(cut) == members
    assert max(s.size for s in cut) - min(s.size for s in cut) <= 1
    for spans, start, stop in [(cut, 0, elements), *((chunks(s, chunk), s.start, s.stop) for s in cut)]:
        assert (spans[0].start, spans[-1].stop) == (start, stop)
        assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    assert all(c.size <= chunk for s in cut for c in chunks(s, chunk))
    assert all(c.size > 0 for s in cut if s.size for c in chunks(s, chunk))
