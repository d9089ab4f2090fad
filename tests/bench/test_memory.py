from __future__ import annotations

import io
from typing import Any

import pytest

from benchmarks.flips import PARTS, PLACES, flips
from benchmarks.memory import (
    loss,
)
from ft_hsdp.bench.results import ProgressLog
from ft_hsdp.state.agent import store
from ft_hsdp.state.transfer import shard_manifest


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


def test_flipped_bytes_are_found_and_the_next_rung_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_bytes = shard_manifest.CHUNK_BYTES
    (row,) = flips(24, ProgressLog(io.StringIO()))
    kinds = [f"{place}, {part}" for place in PLACES for part in PARTS]
    assert row["found"] == row["asked"] == dict.fromkeys(kinds, 4)
    assert (row["missed"], row["chunks"], row["rungs"]) == (0, 4, {"copy": 8, "replica": 16})
    assert chunk_bytes == shard_manifest.CHUNK_BYTES
    # An agent that looks at the manifest alone misses what has flipped in the data.
    monkeypatch.setattr(store, "compare", lambda header, *_: shard_manifest.decode(header))
    (row,) = flips(6, ProgressLog(io.StringIO()))
    missed = {kind for kind in kinds if row["found"][kind] < row["asked"][kind]}
    assert missed == {"own agent, data", "copy at rest, data"}
    assert row["missed"] == 2
