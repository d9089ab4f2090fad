from __future__ import annotations

import itertools

import pytest

from ft_hsdp.ftar import lifecycle
from ft_hsdp.ftar.lifecycle import GroupState

N, C, R, U, A, B, F, X = GroupState

TABLE = {
    N: {C, B, F, X},
    C: {C, R, A, F, X},
    R: {C, U, A, F, X},
    U: {C, R, A, F, X},
    A: {C, B, F, X},
    B: {C, B, F, X},
    F: {X},
    X: set[GroupState](),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(GroupState, GroupState)), ids=lambda s: s.name)
def test_every_way(old: GroupState, new: GroupState) -> None:
    if new in TABLE[old]:
        assert lifecycle.step(old, new) is new
    else:
        with pytest.raises(ValueError, match=f"from {old.name} to {new.name}"):
            lifecycle.step(old, new)


def test_what_is_never_left() -> None:
    """FATAL only ends, CLOSED stays; from a broken ring only an epoch leads on."""
    assert lifecycle.TRANSITIONS[GroupState.CLOSED] == set()
    assert lifecycle.TRANSITIONS[GroupState.FATAL] == {GroupState.CLOSED}
    assert GroupState.READY not in lifecycle.TRANSITIONS[GroupState.BROKEN]
    assert GroupState.RUNNING not in lifecycle.TRANSITIONS[GroupState.BROKEN]
    assert all(
        GroupState.CLOSED in ways for old, ways in lifecycle.TRANSITIONS.items() if old is not GroupState.CLOSED
    )
