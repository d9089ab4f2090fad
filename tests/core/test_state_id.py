import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core import state_id
from ft_hsdp.core.state_id import StateId

BATCHES = [(0, 1, 0, 4), (1, 1, 1, 4)]
ids = st.builds(StateId, st.integers(0, 5), st.integers(0, 5), st.sampled_from(["a", "b"]))


def test_the_initial_state_is_named_by_config_and_weights() -> None:
    zero = state_id.initial("config", "weights")
    assert (zero.commit_epoch, zero.step) == (0, 0)
    assert len(zero.lineage) == 2 * state_id.LINEAGE_BYTES
    assert zero == state_id.initial("config", "weights")
    assert zero.lineage != state_id.initial("config", "other").lineage
    assert zero.lineage != state_id.initial("other", "weights").lineage


def test_the_order_in_which_contributors_are_named_does_not_matter() -> None:
    assert state_id.advance("p", 1, 0, 5, BATCHES, "d") == state_id.advance("p", 1, 0, 5, BATCHES[::-1], "d")


def test_a_later_epoch_beats_a_higher_step() -> None:
    assert state_id.newer(StateId(2, 1, "a"), StateId(1, 7, "b"))
    assert not state_id.newer(StateId(1, 7, "b"), StateId(2, 1, "a"))


@given(ids, ids, ids)
def test_newer_is_a_strict_order(a: StateId, b: StateId, c: StateId) -> None:
    assert not state_id.newer(a, a)
    assert not (state_id.newer(a, b) and state_id.newer(b, a))
    if state_id.newer(a, b) and state_id.newer(b, c):
        assert state_id.newer(a, c)
    if state_id.same(a, b):
        assert not state_id.newer(a, b)


@given(st.lists(st.text(max_size=4), max_size=3), st.lists(st.text(max_size=4), max_size=3))
def test_a_digest_tells_its_parts_apart(a: list[str], b: list[str]) -> None:
    assert (state_id.digest(*a) == state_id.digest(*b)) == (a == b)


STATE = StateId(3, 37, "0" * 32)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_any_slices_in_a_row_cover_the_whole_state_once(nbytes: int, first: int) -> None:
    parts = sorted(state_id.slice_bounds(nbytes, step) for step in range(first, first + state_id.SLICES))
    assert parts[0][0] == 0
    assert parts[-1][1] == nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))


@pytest.mark.parametrize("byte", range(state_id.SLICES))
def test_a_flip_in_any_slice_is_seen_within_as_many_steps(byte: int) -> None:
    sound = bytes(state_id.SLICES)
    corrupt = bytes(i == byte for i in range(state_id.SLICES))
    seen = []
    for step in range(100, 100 + state_id.SLICES):
        begin, end = state_id.slice_bounds(len(sound), step)
        digests = ((0, sound[begin:end].hex()), (1, corrupt[begin:end].hex()), (2, sound[begin:end].hex()))
        seen += [state_id.minority(digests)] if state_id.differ(digests) else []
    assert seen == [(1,)]


@pytest.mark.parametrize(
    ("digests", "differ", "minority"),
    [
        ("", False, None),
        ("a", False, ()),
        ("aa", False, ()),
        ("ab", True, ()),
        ("aab", True, (2,)),
        ("baa", True, (0,)),
        ("abc", True, ()),
        ("aabb", True, ()),
        ("abaa", True, (1,)),
        ("abaca", True, (1, 3)),
    ],
)
def test_who_is_wrong(digests: str, differ: bool, minority: tuple[int, ...] | None) -> None:
    given = tuple(enumerate(digests))
    assert state_id.differ(given) is differ
    if minority is not None:
        assert state_id.minority(given) == minority


def test_it_is_said_in_words() -> None:
    line = state_id.describe(((0, "a"), (1, "b"), (2, "a")), STATE)
    assert line.startswith("replicas 1 differ in slice 5")
    line = state_id.describe(((0, "a"), (1, "b")), STATE)
    assert line.startswith("replicas 0, 1 hold")
