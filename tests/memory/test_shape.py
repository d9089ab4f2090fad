"""Which bytes a rank of one width has for a rank of another width."""

from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.memory.shape import Extent, Tensor, aligned, giver, merged, needed, pieces

PUBLIC = {"a": ((10, 4), 4), "b": ((7,), 4), "c": ((3, 5), 4)}

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=2), st.tuples(shapes, st.sampled_from([1, 2, 4, 8]))
)
widths = st.integers(1, 9)


def parts(of, source: tuple[int, int], target: tuple[int, int]) -> tuple[Extent, ...]:
    """Which bytes of the shard ``source`` go where in the shard ``target``, each a (width, rank)."""
    return merged(piece.extent for piece in pieces([Tensor(*each) for each in of.values()], source, target))


def test_the_public_vectors() -> None:
    """MEMORY's vectors: rank 1 of 3 from 4 ranks."""
    assert parts(PUBLIC, (4, 1), (3, 1)) == ((16, 0, 32), (68, 64, 4), (128, 128, 20))
    assert parts(PUBLIC, (4, 2), (3, 1)) == ((0, 32, 32), (64, 68, 8))
    assert parts(PUBLIC, (4, 0), (3, 1)) == parts(PUBLIC, (4, 3), (3, 1)) == ()


def size(found: dict[str, tuple[tuple[int, ...], int]], width: int, rank: int) -> dict[str, tuple[int, int]]:
    """Where each tensor lies in a shard: (offset, bytes)."""
    at, places = 0, {}
    for name, (shape, itemsize) in found.items():
        tensor = Tensor(shape, itemsize)
        begin, end = tensor.rows(width, rank)
        nbytes = (end - begin) * tensor.row_bytes
        places[name] = at, nbytes
        at += aligned(nbytes)
    return places


@given(tensors, widths, widths)
def test_the_parts_of_all_sources_are_the_target_and_no_byte_more(found, width, width2) -> None:
    """Every byte of a tensor is that of the whole tensor, it comes once, and padding never moves."""
    whole = {name: bytes(range(256)) * 100 for name in found}  # the bytes of each, more than enough
    for rank2 in range(width2):
        want = size(found, width2, rank2)
        target = bytearray(sum(aligned(n) for _, n in want.values()))
        moved = 0
        for rank in range(width):
            have = size(found, width, rank)
            source = bytearray(sum(aligned(n) for _, n in have.values()))
            for name, (at, nbytes) in have.items():
                tensor = Tensor(*found[name])
                first = tensor.rows(width, rank)[0] * tensor.row_bytes
                source[at : at + nbytes] = whole[name][first : first + nbytes]
            for begin, into, nbytes in parts(found, (width, rank), (width2, rank2)):
                assert nbytes > 0
                target[into : into + nbytes] = source[begin : begin + nbytes]
                moved += nbytes
        assert moved == sum(nbytes for _, nbytes in want.values()), "the least possible"
        for name, (at, nbytes) in want.items():
            tensor = Tensor(*found[name])
            first = tensor.rows(width2, rank2)[0] * tensor.row_bytes
            assert target[at : at + nbytes] == whole[name][first : first + nbytes]


@given(tensors, widths, widths)
def test_who_is_needed_is_who_has_something_and_the_giver(found, width, width2) -> None:
    made = [Tensor(*each) for each in found.values()]
    for rank2 in range(width2):
        having = {r for r in range(width) if pieces(made, (width, r), (width2, rank2))}
        assert set(needed(made, width, (width2, rank2))) == having | {giver(width, (width2, rank2))}


def test_what_is_whole_on_each_rank_comes_from_one() -> None:
    made = [Tensor((), 4, "whole"), Tensor((6, 2), 4), Tensor((3,), 8, "whole")]
    for rank2 in range(4):
        givers = [r for r in range(3) if {0, 2} <= {p.tensor for p in pieces(made, (3, r), (4, rank2))}]
        assert givers == [giver(3, (4, rank2))]
        others = [p for r in range(3) if r not in givers for p in pieces(made, (3, r), (4, rank2))]
        assert {p.tensor for p in others} <= {1}


def test_runs_that_touch_in_both_shards_are_one() -> None:
    assert merged([Extent(0, 64, 64), Extent(64, 128, 8), Extent(72, 192, 8)]) == ((0, 64, 72), (72, 192, 8))
    assert parts({"a": ((4, 16), 4), "b": ((4, 16), 4)}, (2, 0), (2, 0)) == ((0, 0, 256),)
