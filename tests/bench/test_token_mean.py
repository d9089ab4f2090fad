from __future__ import annotations

import pytest

from benchmarks import token_mean
from benchmarks.token_mean import EMPTY, Ragged
from ft_hsdp.train.data.batches import IGNORED


def test_the_units_are_unequal_and_one_is_empty() -> None:
    places = [(s, i, r, m) for s in range(2) for i in (0, 2, 3) for r in range(2) for m in range(3)]
    counts = {place: int((Ragged().batch(*place)[1] != IGNORED).sum()) for place in places}
    assert counts[EMPTY] == 0
    assert sorted(counts.values())[1] * 10 < max(counts.values())


@pytest.mark.multiproc
def test_the_gradient_of_real_ranks_is_that_of_one_big_batch_in_fp64() -> None:
    found = token_mean.measure()
    assert (found.steps, found.updates) == (4, 3), "nothing counts in one step, which is committed"
    assert found.alike
    assert found.gradient <= 1e-6, found
    assert found.loss <= 1e-6, found
    assert found.ok
    assert found.mean_over_units > 0.1, "a mean over units passes, too: the test shows nothing"
