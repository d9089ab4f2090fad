"""A user's loop on recorded steps: which units it is given, and how their gradients are added up."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.ring import fold_order
from ft_hsdp.core.units import Places
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.train.replay.job import places_of
from ft_hsdp.train.replay.lanes import ring_sum

LEDGER = Ledger((20, 40), ((0, 2, 3), (0, 9, 1), (1, 5, 10)))


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(0, 1))
def test_the_places_of_units_are_those_at_which_the_ledger_finds_them(chosen: set[int], shard: int) -> None:
    each: Places = tuple((place, 1) for place in sorted(chosen))
    runs = [(s, first + i, 1) for s, first, count in LEDGER.at(shard, each) for i in range(count)]
    assert places_of(LEDGER, runs) == each


@pytest.mark.parametrize("members", [[0], [2, 0, 1], [4, 1, 3, 0]])
def test_a_sum_has_the_order_of_the_ring(members: list[int]) -> None:
    """Relays add nothing. Each shard of a partition begins with another member."""
    settings = Settings("tcp", chunk_bytes=64)
    flats = {r: torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in members if r != 1}
    total = ring_sum(flats, members, settings)
    orders = [fold_order(shard, members, frozenset(flats)) for shard in range(len(members))]
    sums = []
    for first, *others in orders:
        expected = flats[first].clone()
        for other in others:
            expected += flats[other]
        sums.append(expected)
    assert all(any(float(value) == float(s[i]) for s in sums) for i, value in enumerate(total))
    torch.testing.assert_close(total, torch.stack(list(flats.values())).sum(0))
