"""The figures of the papers; where one does not follow from its inputs, the one that does."""

import pytest

from ft_hsdp.analysis.costs import effective_ratio, restart_cost, swap_cost, wasted_time
from ft_hsdp.analysis.plan import loss_rate


def test_gemini_wasted_time() -> None:
    assert wasted_time(42, 42, 42) == 105  # MT-NLG over 20 Gbps, minutes
    assert wasted_time(0, 62, 0) == 31  # a state in local memory each step: with the step itself 1.5 of them
    assert wasted_time(62, 62, 3) == 96  # GEMINI: a copy takes no longer than a step
    with pytest.raises(ValueError, match="a checkpoint each 61 is not possible: it takes 62"):
        wasted_time(62, 61, 3)


def test_gemini_effective_ratio() -> None:
    """Per day: 420 s to recover and 93 s of lost work for each failure."""
    assert effective_ratio(86400 / 8, 420 + 93, "wall_clock") == pytest.approx(0.9525, abs=1e-4)
    assert effective_ratio(86400 / 15, 420 + 93, "wall_clock") == pytest.approx(0.9109, abs=1e-4)


def test_deadpool_costs() -> None:
    """The paper's 18.8 times does not follow from its inputs; these do: 84.3 times."""
    assert restart_cost(0, 1, 34) == 16.5
    lost = sum(150 + steps * 2.08 for steps in (18, 2366))
    swapped = 2 * swap_cost(31.2, 2.08, part=0)
    assert lost == pytest.approx(5258.7, abs=0.1)
    assert lost / swapped == pytest.approx(84.3, abs=0.1)


def test_ft_hsdp_ratios() -> None:
    """A failure each 18 minutes, 10 minutes to restart."""
    assert effective_ratio(18, 10, "wall_clock") == pytest.approx(8 / 18)
    assert effective_ratio(18, 10) == pytest.approx(0.643, abs=1e-3)
    # With the steps that are repeated: 100 steps of 20 s between checkpoints.
    assert effective_ratio(18, restart_cost(10, 20 / 60, 100)) == pytest.approx(0.404, abs=1e-3)
    assert effective_ratio(18, restart_cost(10, 20 / 60, 100), "wall_clock") == 0


def test_deadpool_loss_probability() -> None:
    """The rate in `plan` is the bound of the paper (§V-C) where a lost host is replaced within the step."""
    groups, copies, step_s, per_second = 64, 2, 20.0, 5e-8
    in_a_step = loss_rate(groups, copies, per_second, repair=step_s) * step_s
    assert in_a_step == pytest.approx(groups * copies * (per_second * step_s) ** copies)


def test_shards_are_lost_no_more_often_than_their_hosts() -> None:
    assert loss_rate(3, 4, failures=2.0, repair=0.5) == 3 * 4 * 2.0
    assert loss_rate(3, 64, failures=1e-3, repair=1e120) == pytest.approx(3 * 64 * 1e-3)
