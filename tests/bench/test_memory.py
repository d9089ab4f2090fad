from __future__ import annotations

import io
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flips import PARTS, PLACES, flips
from benchmarks.flips import goals as flip_goals
from benchmarks.memory import (
    MEASURES,
    STEP_SETUPS,
    MemoryOptions,
    goals,
    loss,
    options,
    pid_of,
    planned_bytes,
    segments,
)
from ft_hsdp.analysis.plan import parameters
from ft_hsdp.bench.results import ProgressLog, spread
from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent import store
from ft_hsdp.state.transfer import shard_manifest
from tests.support.bench.tables import shown


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


def test_goals_and_tables() -> None:
    figures, ratio = spread([0.5, 0.6]), {"ratio": 1.01, "low": 1.0, "high": 1.03}
    places = {
        name: {
            "kills": 2,
            "step_ms": 100.0,
            "new": spread([seconds]),
            "beyond": spread([seconds - 0.1]),
            "lost_steps": {"p50": 0, "max": lost},
        }
        for name, seconds, lost in (("memory", 1.0, 1), ("checkpoint", 5.0, 40))
    }
    shape: dict[str, Any] = {"replicas": 1, "ranks": 2, "hosts": 2}
    steps = [
        {
            **shape,
            "step": kind,
            "modes": {"without": figures, "with": figures},
            "times": {"with": ratio},
            "exposed": 0.002,
            "copied_bytes": 9e6,
            "host_bytes": 36e6,
            "of_plan": 1.0,
        }
        for kind in ("waiting", "computing")
    ]
    result: dict[str, Any] = {
        "step": steps,
        "lost": [{**shape, "places": places, "times_as_fast": 5.0}],
        "union": [{**shape, "losses": 2, "new": figures, "lost_steps": 1, "rungs": {"replica": 4}}],
    }
    assert {verdict.text for verdict in goals(result) if not verdict.met} == set()
    assert len(list(goals(result))) == 10
    text = shown(result, goals(result))
    assert "union, rungs" in text or "rungs" in text
    (verdict,) = flip_goals({"flips": [{"bytes": 100, "missed": 1}]})
    assert not verdict.met
