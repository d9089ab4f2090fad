from __future__ import annotations

import itertools

import pytest

from ft_hsdp.ftar import lifecycle
from ft_hsdp.ftar.lifecycle import State

N, C, R, U, A, B, F, X = State

TABLE = {
    N: {C, B, F, X},
    C: {C, R, A, F, X},
    R: {C, U, A, F, X},
    U: {C, R, A, F, X},
    A: {C, B, F, X},
    B: {C, B, F, X},
    F: {X},
    X: set[State](),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)), ids=lambda s: s.name)
def test_every_way(old: State, new: State) -> None:
    if new in TABLE[old]:
        assert lifecycle.step(old, new) is new
    else:
        with pytest.raises(ValueError, match=f"from {old.name} to {new.name}"):
            lifecycle.step(old, new)


def test_what_is_never_left() -> None:
    """FATAL only ends, CLOSED stays; from a broken ring only an epoch leads on."""
    assert lifecycle.WAYS[State.CLOSED] == set()
    assert lifecycle.WAYS[State.FATAL] == {State.CLOSED}
    assert State.READY not in lifecycle.WAYS[State.BROKEN]
    assert State.RUNNING not in lifecycle.WAYS[State.BROKEN]
    assert all(State.CLOSED in ways for old, ways in lifecycle.WAYS.items() if old is not State.CLOSED)
