from __future__ import annotations

import pytest
from launch_rows import commit

from ft_hsdp.core.cursor import Ledger
from ft_hsdp.core.deal import Dealer
from ft_hsdp.launch.replay import _dealt

ROW = commit(3, who=[0, 2])  # both at batch 2 of their shards


@pytest.mark.parametrize(
    ("dealer", "ledger", "right"),
    [
        (Dealer("per_replica", 3), Ledger((2, 1, 2)), True),
        (Dealer("per_replica", 3), Ledger((2, 1, 1)), False),
        (Dealer("per_replica", 3), Ledger((2, 1, 4), ((2, 2),)), True),
        (Dealer("global", 3), Ledger((2,)), False),
    ],
)
def test_a_replay_sees_a_batch_that_was_not_dealt(dealer: Dealer, ledger: Ledger, right: bool) -> None:
    assert _dealt(dealer, ledger, ROW) is right
