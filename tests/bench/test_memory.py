from __future__ import annotations

from typing import Any

from benchmarks.memory import loss


def commit(t: float, step: int, incarnation: str = "0-a-0") -> dict[str, Any]:
    return {"t": t, "step": step, "incarnation": incarnation}


def test_a_new_step_is_one_that_was_not_committed_before() -> None:
    before = [commit(t, t) for t in range(1, 11)]
    assert loss(before, 10.5) is None
    again = [commit(12.0, 10, "0-a-1"), commit(12.5, 11, "0-a-1")]
    found = loss(before + again, 10.5)
    assert found is not None
    assert (found.step, found.new_s, found.lost_steps) == (10, 2.0, 1)
    under_way = [*before, commit(10.6, 11)]
    assert loss(under_way + again, 10.5) is None, "that commit was under way when the host was lost"
    found = loss([*under_way, commit(13.0, 12, "0-a-1")], 10.5)
    assert found is not None
    assert (found.new_s, found.lost_steps) == (2.5, 0)
