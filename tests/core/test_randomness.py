from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.randomness import Permutation


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), turn=st.integers(0, 10**6))
def test_every_place_is_taken_once(n: int, seed: int, turn: int) -> None:
    permutation = Permutation(n, seed, turn)
    assert sorted(permutation[i] for i in range(n)) == list(range(n))
    assert [permutation.index(permutation[i]) for i in range(n)] == list(range(n))


def test_the_same_key_gives_the_same_order_and_another_does_not() -> None:
    def order(seed: int, turn: int) -> list[int]:
        permutation = Permutation(100, seed, turn)
        return [permutation[i] for i in range(100)]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(2, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != list(range(100))


def test_the_order_is_fixed_for_all_time() -> None:
    permutation = Permutation(10, seed=7, turn=0)
    assert [permutation[i] for i in range(10)] == [0, 1, 6, 7, 8, 4, 9, 5, 2, 3]


def test_neighbours_are_scattered() -> None:
    n = 10_000
    permutation = Permutation(n, seed=3, turn=0)
    places = [permutation[i] for i in range(n)]
    near = sum(abs(a - b) < n // 100 for a, b in pairwise(places))
    assert 0.5 < near / n / 0.02 < 1.5  # two independent draws are that near in 2 % of cases
    fixed = sum(i == p for i, p in enumerate(places))
    assert fixed < 10


def test_places_outside_are_refused() -> None:
    permutation = Permutation(5, 0, 0)
    assert len(permutation) == 5
    for place in (-1, 5):
        with pytest.raises(IndexError):
            permutation[place]
        with pytest.raises(IndexError):
            permutation.index(place)
    with pytest.raises(ValueError, match="at least 1"):
        Permutation(0, 0, 0)
