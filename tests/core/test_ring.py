from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.partition import shards
from ft_hsdp.core.ring import Round, fold_order, rounds

Sum = tuple[int, ...]  # the replicas that were added, in order: concatenation shows what addition hides


def reduced(ring: tuple[int, ...], contributors: frozenset[int], elements: int) -> list[list[Sum]]:
    """What each member holds, per element, after an all-reduce by the rounds alone."""
    members = len(ring)
    plan = shards(elements, members)
    mine: list[list[Sum]] = [[(r,) if r in contributors else () for _ in range(elements)] for r in ring]
    held: list[list[Sum | None]] = [list(row) if members == 1 else [None] * elements for row in mine]
    partial = [list(row) for row in mine]
    table = [rounds(p, members) for p in range(members)]
    for t in range(2 * members - 2):
        wire = []
        for p in range(members):
            span = plan[table[p][t].send]
            source = partial[p] if t < members - 1 else held[p]
            wire.append((table[p][t].send, source[span.start : span.stop]))
        for p in range(members):
            now = table[p][t]
            sent, arrived = wire[(p - 1) % members]
            assert sent == now.receive
            span = plan[now.receive]
            for k, got in enumerate(arrived):
                assert got is not None
                at = span.start + k
                if now.reduce:
                    partial[p][at] = got + mine[p][at]
                else:
                    held[p][at] = got
        if t == members - 2:
            for p in range(members):
                span = plan[table[p][t].receive]
                held[p][span.start : span.stop] = partial[p][span.start : span.stop]
    assert all(x is not None for row in held for x in row)
    return [[x for x in row if x is not None] for row in held]


@pytest.mark.parametrize("members", range(1, 17))
@pytest.mark.parametrize("elements", [0, 1, 2, 15, 16, 17, 33])
def test_every_member_ends_with_every_gradient_added_once_in_the_agreed_order(members: int, elements: int) -> None:
    ring = tuple(range(100, 100 + members))
    for contributors in (frozenset(ring), frozenset(ring[::2]), frozenset(ring[1:2]), frozenset[int]()):
        plan = shards(elements, members)
        expected = [
            fold_order(shard, ring, contributors) for shard, span in enumerate(plan) for _ in range(span.size)
        ]
        assert all(sorted(order) == sorted(contributors) for order in expected)
        for held in reduced(ring, contributors, elements):
            assert held == expected


@given(st.permutations(range(7)), st.sets(st.integers(0, 6)), st.integers(0, 20))
def test_any_order_of_the_ring_and_any_relays(ring: list[int], able: set[int], elements: int) -> None:
    everybody = reduced(tuple(ring), frozenset(able), elements)
    assert all(held == everybody[0] for held in everybody)
    for total in everybody[0]:
        assert sorted(total) == sorted(able)


def test_a_ring_of_one_sends_nothing() -> None:
    assert rounds(0, 1) == ()
    assert fold_order(0, (5,), frozenset({5})) == (5,)


def test_the_rounds_of_three() -> None:
    assert rounds(0, 3) == (Round(0, 2, True), Round(2, 1, True), Round(1, 0, False), Round(0, 2, False))


@given(st.integers(2, 32), st.data())
def test_what_arrives_is_what_goes_on(members: int, data: st.DataObject) -> None:
    mine = rounds(data.draw(st.integers(0, members - 1)), members)
    assert len(mine) == 2 * (members - 1)
    assert all(a.receive == b.send for a, b in itertools.pairwise(mine))
    assert [r.reduce for r in mine] == [True] * (members - 1) + [False] * (members - 1)


@pytest.mark.parametrize(("position", "members"), [(3, 3), (-1, 3), (0, 0)])
def test_a_position_outside_the_ring_is_refused(position: int, members: int) -> None:
    with pytest.raises(ValueError, match=f"position {position} is not in a ring of {members}"):
        rounds(position, members)
