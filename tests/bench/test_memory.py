from __future__ import annotations

import io
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flips import PARTS, PLACES, flips
from benchmarks.memory import (
    MEASURES,
    STEP_SETUPS,
    MemoryOptions,
    loss,
    options,
    pid_of,
    planned_bytes,
    segments,
)
from ft_hsdp.analysis.plan import parameters
from ft_hsdp.bench.results import ProgressLog
from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent import store
from ft_hsdp.state.transfer import shard_manifest


def test_options() -> None:
    assert options(Namespace(measure=None, rounds=None, kills=None)) == MemoryOptions(MEASURES, 20, 20)
    assert options(Namespace(measure="lost", rounds=2, kills=3)) == MemoryOptions(("lost",), 3, 2)
    with pytest.raises(ConfigError, match="step, lost, union"):
        options(Namespace(measure="gaps", rounds=None, kills=None))


def test_a_segment_that_an_agent_maps_counts_once(tmp_path: Path) -> None:
    log = tmp_path / "agent-r0h0.log"
    log.write_text("started\n" + json.dumps({"pid": os.getpid()}) + "\n")
    assert pid_of(log) == os.getpid()
    before = segments(os.getpid())
    fd = shared_memory.create(5000)
    try:
        view = shared_memory.attach(fd, 5000, writable=True)  # the mapping has a descriptor of its own
        assert (segments(os.getpid()) - before, view.size) == (os.fstat(fd).st_size, 5000)
    finally:
        os.close(fd)


def test_the_memory_of_hosts_stands_beside_what_plan_says() -> None:
    waiting = planned_bytes(STEP_SETUPS["waiting"])  # 6 layers of 2^18 elements, 12 bytes each, on two hosts
    assert waiting == 2 * 2 * 12 * 6 * (1 << 18) // 2
    assert planned_bytes(STEP_SETUPS["waiting"], copies=1) == waiting // 2
    computing = parse({"model": {"layers": 6, "dim": 192, "heads": 6}})
    assert planned_bytes(STEP_SETUPS["computing"]) == pytest.approx(2 * 12 * parameters(computing), abs=4)


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
