from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core import state_id
from ft_hsdp.core.state_id import StateId

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
    assert line == "replicas 1 differ in slice 5 of (3, 37, 00000000) from replicas 0, 2, which agree"
    line = state_id.describe(((0, "a"), (1, "b")), STATE)
    assert line.startswith("replicas 0, 1 hold different states in slice 5 of (3, 37, 00000000)")
