import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.memory.lanes import RowLane, lanes, without_rows

TENSORS = {"a": ((10, 4), 4), "b": ((7,), 4), "c": ((3, 5), 4)}


def described(lane: RowLane) -> str:
    return " ".join(f"{r.tensor}{r.start}-{r.stop - 1}" for r in lane.rows)


def test_the_lanes_of_four_and_three_ranks() -> None:
    found = lanes(TENSORS, (4, 3))
    assert [(lane.owners, described(lane), lane.elements) for lane in found] == [
        ((0, 0), "a0-2 b0-1 c0-0", 19),
        ((1, 0), "a3-3 b2-2", 5),
        ((1, 1), "a4-5 b3-3 c1-1", 14),
        ((2, 1), "a6-7 b4-5", 10),
        ((2, 2), "a8-8 c2-2", 9),
        ((3, 2), "a9-9 b6-6", 5),
    ]
    assert lanes(TENSORS, (3, 4, 3)) == found


@pytest.mark.parametrize(
    ("widths", "many", "most"),
    [((2, 1), 2, 2), ((3, 2), 4, 2), ((4, 3), 6, 2), ((8, 7), 14, 2), ((8, 7, 6), 18, 3), ((4, 3, 2), 6, 3)],
)
def test_how_many_lanes_there_are(widths: tuple[int, ...], many: int, most: int) -> None:
    """Of a tensor with so many rows that each rank has about the same number."""
    found = lanes({"w": ((840 * 4, 2), 4)}, widths)
    assert len(found) == many
    assert max(sum(lane.owner(w) == r for lane in found) for w in widths for r in range(w)) == most


shapes = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
tensors = st.dictionaries(st.sampled_from("abcdef"), st.tuples(shapes, st.just(4)), min_size=1)
some_widths = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(tensors, some_widths)
def test_every_row_is_in_one_lane_that_its_owners_have(named, widths) -> None:
    found = lanes(named, widths)
    assert len({lane.owners for lane in found}) == len(found)
    assert [lane.owners for lane in found] == sorted(lane.owners for lane in found)
    for name, (shape, _) in named.items():
        rows = [(r, lane) for lane in found for r in lane.rows if r.tensor == name]
        assert sorted(row for r, _ in rows for row in range(r.start, r.stop)) == list(range(shape[0]))
        per_row = 1
        for size in shape[1:]:
            per_row *= size
        assert sum(r.elements for r, _ in rows) == shape[0] * per_row
        for r, lane in rows:
            for width in widths:
                chunk = -(-shape[0] // width)
                assert {row // chunk for row in range(r.start, r.stop)} == {lane.owner(width)}


@given(tensors, st.integers(1, 9), st.integers(1, 4))
def test_with_equal_widths_the_lanes_are_the_ranks(named, width, members) -> None:
    found = lanes(named, [width] * members)
    without = without_rows(named, width)
    assert [lane.owners for lane in found] == [(rank,) for rank in range(width) if rank not in without]
    for lane in found:
        for r in lane.rows:
            rows, chunk = named[r.tensor][0][0], -(-named[r.tensor][0][0] // width)
            first = lane.owners[0] * chunk
            assert (r.start, r.stop) == (first, min(first + chunk, rows)), "the shard that FSDP2 gives the rank"


@pytest.mark.parametrize(
    ("named", "widths", "message"),
    [
        (TENSORS, (), "widths: got "),
        (TENSORS, (4, 0), "widths: got "),
        ({"s": ((), 4)}, (4, 3), "tensor s: got no dimension"),
    ],
)
def test_what_has_no_lanes(named, widths, message) -> None:
    with pytest.raises(ValueError, match=message):
        lanes(named, widths)


def test_a_rank_without_a_row() -> None:
    assert without_rows({"b": ((7,), 4)}, 5) == (4,)
    assert without_rows(TENSORS, 4) == ()
