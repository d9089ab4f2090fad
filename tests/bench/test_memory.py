from __future__ import annotations

import io
import json
import os
import socket
import tempfile
import threading
from argparse import Namespace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.analysis import reliability, survival
from ft_hsdp.analysis.plan import parameters
from ft_hsdp.bench import goals
from ft_hsdp.bench.command import MEMORY, memory_options
from ft_hsdp.bench.hsdp import network
from ft_hsdp.bench.memory.bench import STEP_SETUPS, AgentWatch, pid_of, planned_bytes, plans, segments
from ft_hsdp.bench.memory.flips import PARTS, PLACES, flips
from ft_hsdp.bench.memory.gaps import MODES, SETUP, gaps, idle, report
from ft_hsdp.bench.memory.lost import loss
from ft_hsdp.bench.results import ProgressLog, spread
from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.state import shared_memory
from ft_hsdp.state.agent import store
from ft_hsdp.state.transfer import shard_manifest
from tests.support.bench.tables import shown
from tests.support.launch.launch_helpers import until


def test_all_measures_unless_one_is_named() -> None:
    words = Namespace(measure=None, rounds=None, kills=None)
    assert memory_options(words).measures == MEMORY
    assert memory_options(words).rounds == {"step": 20, "none": 5, "gaps": 9}
    words = Namespace(measure="gaps", rounds=2, kills=3)
    options = memory_options(words)
    assert (options.measures, options.rounds["gaps"], options.kills) == (("gaps",), 2, 3)
    with pytest.raises(ConfigError, match="step, none, plan, gaps"):
        memory_options(Namespace(measure="all of it", rounds=None, kills=None))


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


async def test_what_an_agent_sends_and_its_threads_are_counted() -> None:
    one, other = socket.socketpair()
    with tempfile.TemporaryFile() as file, one, other:
        file.write(b"x" * 50_000)
        file.flush()
        watch = AgentWatch([os.getpid()])
        threads, over = watch.threads, threading.Event()
        helpers = [threading.Thread(target=over.wait) for _ in range(2)]
        try:
            for helper in helpers:
                helper.start()
            other.send(b"orders do not count")
            assert watch.sent < 10_000
            assert os.sendfile(one.fileno(), file.fileno(), 0, 50_000) == 50_000
            assert watch.sent >= 50_000
            await until(lambda: watch.threads >= threads + 3, "the helpers and the watch itself")
        finally:
            over.set()
            watch.end()


def test_the_memory_of_hosts_stands_beside_what_plan_says() -> None:
    waiting = planned_bytes(STEP_SETUPS["waiting"])  # 6 layers of 2^18 elements, 12 bytes each, on two hosts
    assert waiting == 2 * 2 * 12 * 6 * (1 << 18) // 2
    assert planned_bytes(STEP_SETUPS["waiting"], copies=1) == waiting // 2
    computing = parse({"model": {"layers": 6, "dim": 192, "heads": 6}})
    assert planned_bytes(STEP_SETUPS["computing"]) == pytest.approx(2 * 12 * parameters(computing), abs=4)


def test_the_figures_of_plan_are_compared_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = plans(ProgressLog(io.StringIO()), hosts=16, runs=2)
    assert (row["not_exact"], row["took"]["count"]) == (0, 2)
    assert row["compared"] == {"by the formula": 8, "of 10 hosts by trial": 8}
    exact = survival.probability
    monkeypatch.setattr(reliability, "probability", lambda ways, lost: exact(ways, lost) * Fraction(999, 1000))
    (row,) = plans(ProgressLog(io.StringIO()), hosts=16, runs=1)
    assert row["not_exact"] >= 8


def took(**times: float) -> dict[str, list[float]]:
    return {name: [times[name] + 0.0001 * n for n in range(5)] for name in MODES}


def test_how_copies_travel_beside_the_goals() -> None:
    seconds = took(none=0.5, blocking=0.55, greedy=0.52, reactive=0.505, planned=0.501)
    sent = {name: [6e6, 12e6, 7e6] for name in MODES}
    idles = {"none": None, "planned": 0.99, "reactive": 0.97}
    row = report(SETUP, 5, seconds, sent, idles, {"planned": [True] * 5, "reactive": [False] * 5})
    assert row["planned_share"] == {"planned": 1, "reactive": 0}
    assert row["idle_share"] == {"planned": 0.99, "reactive": 0.97}
    assert row["link_bytes_per_step"]["greedy"] == 7_000_000
    empty: dict[str, Any] = {name: [] for name in MEMORY}
    result = {**empty, "gaps": [row]}
    assert {v.text: v.met for v in goals.memory(result)} == {
        "planned on a link: a step, times": True,
        "blocking - greedy, apart by": True,
        "greedy - planned, apart by": True,
        "planned: blocks by a plan, of all": True,
        "planned: bytes in idle spans": True,
    }
    text = shown("memory", result)
    assert "left in idle spans: planned 99.0 %, reactive 97.0 %" in text
    assert "with a plan in force (CopiesPaced): planned 100 %, reactive 0 %" in text
    alike = took(none=0.5, blocking=0.5, greedy=0.5, reactive=0.5, planned=0.52)
    row = report(SETUP, 5, alike, sent, {"planned": 0.9}, {"planned": [True] * 4 + [False]})
    assert not any(v.met for v in goals.memory({**empty, "gaps": [row]}))


def test_the_share_of_idle_spans_is_of_the_blocks_alone() -> None:
    before = [{"sent": 100, "idle": 0}, {"sent": 100, "idle": 50}]
    after = [{"sent": 300, "idle": 150}, {"sent": 200, "idle": 150}]
    assert idle(before, after) == 0.833
    assert idle(before, before) is None


def test_without_root_the_links_are_left_out_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "RIGHTS", {"CAP_THAT_NOBODY_HAS": 63})
    stream = io.StringIO()
    assert gaps(1, ProgressLog(stream)) == []
    assert "needs root" in stream.getvalue()


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
        "none": [{**shape, "steps": 10, "bytes": 0, "threads": 0, "orders": 1}],
        "plan": [{"hosts": 8, "copies": 4, "took": figures, "compared": {"by trial": 2}, "not_exact": 0}],
        "gaps": [],
        "lost": [{**shape, "places": places, "times_as_fast": 5.0}],
        "union": [{**shape, "losses": 2, "new": figures, "lost_steps": 1, "rungs": {"replica": 4}}],
        "flips": [
            {
                "bytes": 100,
                "chunks": 4,
                "flips": 2,
                "asked": {"own agent, data": 2},
                "found": {"own agent, data": 1},
                "rungs": {"copy": 2},
                "missed": 1,
            },
        ],
    }
    missed = {verdict.text for verdict in goals.memory(result) if not verdict.met}
    assert missed == {"no copies needed: orders", "flipped bytes that were not found"}
    assert len(list(goals.memory(result))) == 16
    text = shown("memory", result)
    assert "restored: 4 from replica" in text
    assert "1 of 2 in own agent, data" in text
