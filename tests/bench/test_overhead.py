from __future__ import annotations

import io
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.bench import goals, overhead
from ft_hsdp.bench.hsdp.processes import HsdpSetup
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.bench.results import ProgressLog, ratio_interval, spread
from tests.support.bench.tables import shown


def test_a_ratio_has_an_interval_around_it() -> None:
    under = [1.0 + 0.01 * (n % 7) for n in range(50)]
    found = ratio_interval([2 * value for value in under], under)
    assert found == {"ratio": 2.0, "low": 2.0, "high": 2.0}  # what slows both is no difference
    noise = [1.0 + 0.1 * ((n * 7) % 11) for n in range(50)]
    found = ratio_interval(noise, under)
    assert found["low"] < found["ratio"] < found["high"]


def test_link_is_measured_on_request() -> None:
    assert overhead.options(Namespace(measure=None, rounds=None)) == {"steady": 70, "snapshot": 30, "ray": 6}
    assert overhead.options(Namespace(measure="all", rounds=1)) == dict.fromkeys(
        ("steady", "snapshot", "ray", "link"), 1
    )


def test_goals_and_tables() -> None:
    figures = spread([0.5, 0.6])
    found = {"ratio": 1.05, "low": 1.01, "high": 1.09}
    row: dict[str, Any] = {"replicas": 3, "ranks": 2}
    crews = dict.fromkeys(("hsdp", "hsdp again", "ft_hsdp, tcp"), figures)
    result: dict[str, Any] = {
        "steady": [{**row, "crews": crews, "times": dict.fromkeys(("hsdp again", "ft_hsdp, tcp"), found)}],
        "snapshot": [
            {**row, "step": step, "modes": {"without": figures, "with": figures}, "times": {"with": found}}
            for step in ("computing", "waiting")
        ],
        "ray": [
            {
                **row,
                "steps": 40,
                "launchers": {"up": figures, "ray": figures},
                "times": {"ray": {"ratio": 1.02, "low": 1.01, "high": 1.03}},
            }
        ],
        "link": [],
    }
    seen = {verdict.text: (verdict.seen, verdict.met) for verdict in goals.overhead(result)}
    assert seen == {
        "ft_hsdp, tcp: a step, times HSDP's": (1.05, False),
        "snapshot each step, computing: times as long": (1.05, True),
        "snapshot each step, waiting: times as long": (1.05, False),
        "under Ray: a step, times that under up": (1.02, True),
    }
    assert "ft_hsdp, tcp" in shown(result, goals.overhead(result))


def test_overhead_take_turns_abba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn's figure is paired with the other's beside it."""
    order: list[str] = []

    def turn(name: str, setup: RecoverySetup, steps: int) -> float:
        assert (setup.replicas, steps) == (3, 7)
        order.append(name)
        return len(order) / 100

    monkeypatch.setattr(overhead, "LAUNCHERS", {name: partial(turn, name) for name in ("up", "ray")})
    (row,) = overhead.ray(3, ProgressLog(io.StringIO()), steps=7)
    assert order == ["up", "ray", "ray", "up", "up", "ray"]
    assert row["launchers"]["up"] == spread([0.01, 0.04, 0.05])
    assert row["times"]["ray"]["ratio"] == 0.75
    assert (row["rounds"], row["steps"]) == (3, 7)


def test_without_ray_there_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "version", lambda name: None)
    log = ProgressLog(io.StringIO())
    assert overhead.ray(3, log) == []
    assert log.notes == ["ray is left out: not installed"]


@pytest.mark.proof
@pytest.mark.multiproc
def test_both_train_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sections = {"train": {"micro_batch": 1, "seq_len": 8}, "model": {"dim": 8, "layers": 1, "heads": 1}}
    setup = HsdpSetup(replicas=1, ranks=1, sections=sections, waiting=(64, 0.01))
    (row,) = overhead.steady(2, ProgressLog(io.StringIO()), setup, transports=("tcp",))
    assert {name: crew["count"] for name, crew in row["crews"].items()} == {
        "hsdp": 2,
        "hsdp again": 2,
        "ft_hsdp, tcp": 2,
    }
    assert min(crew["min_ms"] for crew in row["crews"].values()) > 10  # each waits as long as it is told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_job_takes_a_turn_under_each_launcher() -> None:
    pytest.importorskip("ray")
    setup = RecoverySetup(replicas=2, layers=1, elements=256, wait_s=0.02)
    (row,) = overhead.ray(1, ProgressLog(io.StringIO()), setup, steps=3)
    assert {name: found["count"] for name, found in row["launchers"].items()} == {"up": 1, "ray": 1}
    assert min(found["min_ms"] for found in row["launchers"].values()) > 20  # each waits as long as it is told


@pytest.mark.soak
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_cluster_ends_with_the_bench() -> None:
    """Ctrl-C while the job trains on it."""
    pytest.importorskip("ray")
    command = [
        sys.executable,
        "-m",
        "ft_hsdp.launch.cli",
        "bench",
        "overhead",
        "--measure",
        "ray",
        "--rounds",
        "9",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if ", ray: a step of" in line:  # the next turn is Ray's as well
                    break
            below = psutil.Process(process.pid)
            deadline = time.monotonic() + 60
            while not any("RankActor" in " ".join(child.cmdline()) for child in below.children(recursive=True)):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(90) == 130
            assert process.stderr.read().splitlines()[-1] == "stopped"
        finally:
            process.kill()
