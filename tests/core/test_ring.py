from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.ring import Operation, OperationKind, fold_order, operations

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


@given(st.permutations(range(7)), st.sets(st.integers(0, 6)))
def test_any_order_of_the_ring_and_any_relays(ring: list[int], able: set[int]) -> None:
    everybody = reduced(tuple(ring), frozenset(able))
    assert all(held == everybody[0] for held in everybody)
    assert all(sorted(total) == sorted(able) for total in everybody[0].values())


def test_a_ring_of_one_only_stores() -> None:
    assert operations(0, 1) == (Operation(0, OperationKind.STORE, 0),)
    assert fold_order(0, (5,), frozenset({5})) == (5,)


def test_the_operations_of_three() -> None:
    assert operations(0, 3) == (
        Operation(0, OperationKind.COPY_SEND, 0),
        Operation(1, OperationKind.REDUCE_SEND, 2),
        Operation(2, OperationKind.REDUCE_STORE_SEND, 1),
        Operation(3, OperationKind.STORE_SEND, 0),
        Operation(4, OperationKind.STORE, 2),
    )


@pytest.mark.parametrize("members", range(2, 17))
def test_the_five_kinds(members: int) -> None:
    """FT-HSDP §4.2: N-1 steps send partial sums, N-1 final ones; the one between them is fused."""
    for position in range(members):
        kinds = [o.kind for o in operations(position, members)]
        assert kinds == [
            OperationKind.COPY_SEND,
            *[OperationKind.REDUCE_SEND] * (members - 2),
            OperationKind.REDUCE_STORE_SEND,
            *[OperationKind.STORE_SEND] * (members - 2),
            OperationKind.STORE,
        ]
        assert len(kinds) == 2 * members - 1
        assert sum(k.sends for k in kinds) == sum(k.receives for k in kinds) == 2 * members - 2
        assert sum(k.reduces for k in kinds) == members - 1


@given(st.integers(2, 32), st.data())
def test_what_an_operation_sends_is_what_the_neighbours_next_one_receives(
    members: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, members - 1))
    mine, right = operations(position, members), operations((position + 1) % members, members)
    assert [o.number for o in mine] == list(range(2 * members - 1))
    for a, b in zip(mine, right[1:], strict=False):
        assert a.kind.sends
        assert b.kind.receives
        assert a.shard == b.shard
        assert b.kind.reduces == (a.kind in (OperationKind.COPY_SEND, OperationKind.REDUCE_SEND)), (
            "a partial sum is not a final one"
        )
    assert all((a.shard - b.shard) % members == 1 for a, b in itertools.pairwise(mine))


@pytest.mark.parametrize(("position", "members"), [(3, 3), (-1, 3), (0, 0)])
def test_a_position_outside_the_ring_is_refused(position: int, members: int) -> None:
    with pytest.raises(ValueError, match=f"position {position} is not in a ring of {members}"):
        operations(position, members)
