from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.cursor import Ledger


def test_only_contributors_move_on() -> None:
    assert Ledger((4, 4, 3)).advance([(0, 4), (2, 3)]) == Ledger((5, 4, 4))
    assert Ledger.empty(3).advance([]) == Ledger((0, 0, 0))


@pytest.mark.parametrize("index", [0, 3, 5])
def test_a_batch_that_is_not_the_next_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=rf"batch {index} of data shard 1 is not the next one, 4"):
        Ledger((9, 4)).advance([(1, index)])


def test_a_batch_counts_once_even_within_a_step() -> None:
    with pytest.raises(ValueError, match="not the next one"):
        Ledger((0, 0)).advance([(0, 0), (0, 0)])


@given(st.lists(st.sets(st.integers(0, 3)), max_size=20))
def test_every_batch_exactly_once_in_order(steps: list[set[int]]) -> None:
    ledger, trained = Ledger.empty(4), []
    for contributors in steps:
        batches = [(shard, ledger.cursors[shard]) for shard in sorted(contributors)]
        trained += batches
        ledger = ledger.advance(batches)
    for shard in range(4):
        mine = [index for s, index in trained if s == shard]
        assert mine == list(range(ledger.cursors[shard]))
