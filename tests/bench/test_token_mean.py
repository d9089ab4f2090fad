from __future__ import annotations

import pytest

from benchmarks import token_mean


@pytest.mark.multiproc
def test_the_gradient_of_real_ranks_is_that_of_one_big_batch_in_fp64() -> None:
    found = token_mean.measure()
    assert (found.steps, found.updates) == (4, 3), "nothing counts in one step, which is committed"
    assert found.alike
    assert found.gradient <= 1e-6, found
    assert found.loss <= 1e-6, found
    assert found.ok
    assert found.mean_over_units > 0.1, "a mean over units passes, too: the test shows nothing"
