from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.config import ChaosConfig
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.chaos import Injection, Planner, by_hand
from ft_hsdp.launch.rundir import RunDir, read_jsonl, write_json

ALL = (0, 1, 2)


def planner(*rules: dict[str, Any], ranks: int = 2) -> Planner:
    return Planner([ChaosConfig.model_validate(rule) for rule in rules], ranks)


def test_a_step_is_hit_once_while_it_is_in_flight() -> None:
    plan = planner({"at_step": 5, "replicas": (1,), "rank": 1, "down_steps": 3})
    assert plan.due(3, 0.0, ALL) == []
    assert plan.due(4, 0.1, ALL) == [Injection(1, 1, "KILL", 3, 0.0, "chaos at step 5")]
    assert plan.due(5, 0.2, ALL) == []


def test_the_first_step_can_be_hit_before_anything_is_committed() -> None:
    assert len(planner({"at_step": 1, "replicas": (0,)}).due(0, 0.0, ALL)) == 1


def test_all_replicas_of_a_rule_are_hit_and_one_that_is_down_when_it_runs() -> None:
    plan = planner({"at_step": 2, "replicas": (0, 2), "signal": "STOP", "for_s": 4.0})
    assert [i.replica for i in plan.due(7, 0.0, (1, 2))] == [2]
    assert plan.due(8, 0.0, (1, 2)) == []
    assert plan.due(9, 0.0, ALL) == [Injection(0, 0, "STOP", 0, 4.0, "chaos at step 2")]


def test_a_rate_starts_with_the_first_commit_and_is_kept_on_average() -> None:
    plan = planner({"rate_per_min": 60, "replicas": ALL, "seed": 3})
    assert plan.due(0, 1e6, ALL) == []
    made = [i for t in range(10_000) for i in plan.due(1, t / 10, ALL)]
    assert 850 < len(made) < 1150
    assert {i.replica for i in made} == {0, 1, 2}
    assert {i.rank for i in made} == {0, 1}


@given(st.integers(0, 2**32), st.lists(st.floats(0.01, 5.0), max_size=30))
def test_equal_seeds_plan_equal_failures(seed: int, waits: list[float]) -> None:
    rule = {"rate_per_min": 120, "replicas": (0, 2), "seed": seed, "rank": 1}
    one, two, now = planner(rule), planner(rule), 0.0
    for wait in waits:
        now += wait
        due = one.due(1, now, (0, 1))
        assert due == two.due(1, now, (0, 1))
        assert all((i.replica, i.rank) == (0, 1) for i in due)
        assert len(due) <= 1


@pytest.fixture
def victim(run_dir: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """A process that names its run, as ranks do, listed as rank 1 of replica 0."""
    code = "import time; print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(run_dir.path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        _list(run_dir, process.pid)
        yield process
        process.kill()


def _list(run: RunDir, pid: int) -> None:
    ranks = [{"rank": 1, "pid": pid, "state": "running"}]
    write_json(run.processes(0), {"replica": 0, "incarnation": "0-a-0", "restarts": 0, "ranks": ranks})


def test_by_hand_kills_the_listed_rank_and_records_it(run_dir: RunDir, victim: subprocess.Popen[bytes]) -> None:
    made = by_hand(run_dir, 0, 1, "KILL")
    assert victim.wait(10) == -signal.SIGKILL
    assert read_jsonl(run_dir.injections(0)) == [made]
    assert (made["event"], made["pid"], made["incarnation"]) == ("FailureInjected", victim.pid, "0-a-0")


def test_by_hand_stop_is_lifted(run_dir: RunDir, victim: subprocess.Popen[bytes]) -> None:
    by_hand(run_dir, 0, 1, "STOP", 0.05)
    assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED
    assert [e["event"] for e in read_jsonl(run_dir.injections(0))] == ["FailureInjected", "FailureLifted"]


def test_by_hand_signals_nothing_that_is_not_the_runs(run_dir: RunDir, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd="/") as stranger:
        _list(run_dir, stranger.pid)
        with pytest.raises(ConfigError, match="is another one"):
            by_hand(RunDir(run_dir.path), 0, 1, "KILL")
        assert stranger.poll() is None
        stranger.kill()
    with pytest.raises(ConfigError, match="does not"):
        by_hand(run_dir, 0, 1, "KILL")
    with pytest.raises(ConfigError, match="--rank: got 0"):
        by_hand(run_dir, 0, 0, "KILL")
    with pytest.raises(ConfigError, match="--replica: got 5"):
        by_hand(run_dir, 5, 0, "KILL")
    with pytest.raises(ConfigError, match="--for-s"):
        by_hand(run_dir, 0, 1, "KILL", 3.0)
    assert json.loads(run_dir.processes(0).read_text())["ranks"][0]["rank"] == 1
