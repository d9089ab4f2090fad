"""A trace is what Perfetto's importer of Chrome's JSON demands, and says what the run's logs say."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.trace import trace, write
from tests.support.launch import launch_rows
from tests.support.launch.launch_rows import written
from tests.support.refused import refused

T = 1_700_000_000.0
REQUIRED = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}}
METADATA = {"process_name": "name", "thread_name": "name"} | dict.fromkeys(
    ("process_sort_index", "thread_sort_index"), "sort_index"
)


def commit(step: int, t: float, **other: Any) -> dict[str, Any]:
    waits = {"quorum": 0.0, "ftar": 0.25, "commit": 0.125}
    return launch_rows.commit(step, t=T + t, **{"who": (0, 1), "units": 6, "loss": 2.0, "waits": waits, **other})


def event(
    name: str, t: float, replica: int | None = None, rank: int | None = None, **facts: Any
) -> dict[str, Any]:
    return {"t": T + t, "event": name, "source": "x", "replica": replica, "rank": rank, "reason": "why", **facts}


def check(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that are no metadata, if the document is valid."""
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    events = document["traceEvents"]
    named: set[tuple[int, int | None]] = set()
    newest: dict[tuple[int, int], int] = defaultdict(int)
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for e in events:
        track = (e["pid"], e["tid"])
        assert REQUIRED[e["ph"]] <= set(e), e
        assert all(type(e[key]) is int and e[key] >= 0 for key in ("ts", "pid", "tid"))
        assert isinstance(e["name"], str)
        assert e["name"]
        if e["ph"] == "M":
            assert set(e["args"]) == {METADATA[e["name"]]}
            named.add((e["pid"], e["tid"] if e["name"].startswith("thread") else None))
            continue
        assert e["pid"] > 0
        assert e["ts"] >= newest[track], "a track goes forwards"
        newest[track] = e["ts"]
        assert {track, (e["pid"], None)} <= named, "every track has its name, before its events"
        if e["ph"] == "C":
            assert all(isinstance(v, int | float) and math.isfinite(v) for v in e["args"].values())
        if e["ph"] == "i":
            assert e["s"] in ("g", "p", "t")
        if e["ph"] == "X":
            assert type(e["dur"]) is int
            assert e["dur"] > 0
            ends = open_until[track]
            while ends and ends[-1] <= e["ts"]:
                ends.pop()
            assert not ends or e["ts"] + e["dur"] <= ends[-1], "slices are nested"
            ends.append(e["ts"] + e["dur"])
    return [e for e in events if e["ph"] != "M"]


def slices(events: list[dict[str, Any]], pid: int, tid: int) -> list[tuple[str, int, int]]:
    found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in found]


def test_steps_with_their_waits_inside() -> None:
    rows = [commit(1, 1.0), commit(2, 2.0, waits={"quorum": 0.1, "ftar": 0.2, "commit": 0.3, "offload": 9.0})]
    shown = check(trace("run", [], {0: rows}, rows))
    assert slices(shown, 10, 1) == [
        ("step 1", 0, 1_000_000),
        ("ftar", 625_000, 875_000),
        ("commit", 875_000, 1_000_000),
        ("step 2", 1_000_000, 2_000_000),
        ("quorum", 1_400_000, 1_500_000),
        ("ftar", 1_500_000, 1_700_000),
        ("commit", 1_700_000, 2_000_000),
    ]
    counters = [(e["name"], e["ts"], e["args"]) for e in shown if e["ph"] == "C"]
    values = {"loss": 2, "healthy": 2, "units": 6}
    assert counters == [(name, ts, {name: n}) for ts in (1_000_000, 2_000_000) for name, n in values.items()]


def test_lives_fetches_marks_and_who_said_what() -> None:
    events = [
        event("ReplicaStarted", 0.0, 1, incarnation="1-x-0"),
        event("CheckedIn", 2.0, 1, 0, incarnation="1-x-0"),
        event("EpochGranted", 2.5, epoch=1, members=[0, 1], step=1),
        event("FailureInjected", 3.0, 1, 1, incarnation="1-x-0", kind="SIGKILL", pid=7),
        event("ReplicaExited", 3.5, 1, incarnation="1-x-0", kind="SIGKILL"),
        event("ReplicaStarted", 4.0, 1, incarnation="1-x-1"),
        event("FetchStarted", 5.0, 1, 1, incarnation="1-x-1"),
        event("FetchCompleted", 6.0, 1, 1, incarnation="1-x-1", seconds=0.75, given={"0": 5}),
        event("ReplicaExited", 9.0, 1, incarnation="1-x-1", kind="done"),
    ]
    torchrun = {"ReplicaStarted": "ReplicaBooted", "ReplicaExited": "ExitReported"}
    untold = [{**row, "event": torchrun.get(row["event"], row["event"])} for row in events]
    lives = [("1-x-0", 0, 3_500_000), ("start", 0, 2_000_000), ("1-x-1", 4_000_000, 9_000_000)]
    assert slices(check(trace("run", untold, {}, [])), 11, 2) == lives
    shown = check(trace("run", events, {}, []))
    assert slices(shown, 11, 2) == lives
    assert slices(shown, 11, 11) == [("fetch", 5_250_000, 6_000_000)]
    marks = [(e["name"], e["ts"]) for e in shown if e.get("s") == "g"]
    assert marks == [
        ("epoch 1: members 0, 1 at step 1", 2_500_000),
        ("SIGKILL sent to replica 1 rank 1 (pid 7)", 3_000_000),
        ("replica 1 is down: SIGKILL", 3_500_000),
    ]
    (started,) = [e for e in shown if e["name"] == "FetchStarted"]
    assert (started["pid"], started["tid"], started["args"]["incarnation"]) == (11, 11, "1-x-1")


seconds = st.floats(0, 100, allow_nan=False)
odd = st.floats(-5, 100) | st.just(math.nan) | st.just(math.inf)
rows = st.builds(
    lambda step, t, s, q, f, c, loss: commit(
        step, t, step_s=s, loss=loss, waits={"quorum": q, "ftar": f, "commit": c}
    ),
    st.integers(1, 9),
    seconds,
    seconds,
    odd,
    odd,
    odd,
    odd,
)
names = st.sampled_from(
    ["ReplicaStarted", "CheckedIn", "ReplicaExited", "FetchCompleted", "EpochGranted", "FailureInjected", "Odd"]
)
told = st.builds(
    lambda name, t, replica, rank, life, s: event(
        name, t, replica, rank, incarnation=life, seconds=s, kind="SIGKILL", facts=[math.nan, {"x": math.inf}]
    ),
    names,
    seconds,
    st.none() | st.integers(0, 2),
    st.none() | st.integers(0, 2),
    st.sampled_from(["a", "b"]),
    seconds,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(told, max_size=12), st.lists(rows, max_size=8), st.lists(rows, max_size=8))
def test_whatever_was_logged_the_trace_is_valid(events: Any, one: Any, other: Any) -> None:
    check(trace("run", events, {0: one, 1: other}, one))


@pytest.mark.parametrize("merged", [True, False])
def test_a_run_directory(tmp_path: Path, merged: bool) -> None:
    run = RunDir(tmp_path / "run")
    written(run.commits(0), commit(1, 1.0), commit(2, 2.0))
    written(run.commits(1), commit(1, 1.0))
    written(run.replica_events(0), event("CheckedIn", 0.5, 0, 0, incarnation="0-x-0"))
    if merged:
        written(run.metrics, commit(1, 1.0), commit(2, 2.0))
    path = write(run)
    assert path == run.path / "trace.json"
    shown = check(json.loads(path.read_text()))
    assert {e["pid"] for e in shown} == {1, 10, 11}
    assert [e["ts"] for e in shown if e["name"] == "loss"] == [1_000_000, 2_000_000]
    assert write(run, tmp_path / "other.json") == tmp_path / "other.json"


def test_nothing_recorded_and_no_place_to_write_are_one_line(tmp_path: Path) -> None:
    refused(lambda: write(RunDir(tmp_path)), r"^run: got .*; allowed: a run that has recorded something$")
    written(RunDir(tmp_path).commits(0), commit(1, 1.0))
    with pytest.raises(ConfigError, match=r"^OUT: got .*; allowed: a file that can be written \(No such file"):
        write(RunDir(tmp_path), tmp_path / "no" / "where.json")
