from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.bench.hsdp.scene import Scene
from ft_hsdp.bench.interval import times
from ft_hsdp.bench.overhead.goals import verdicts
from ft_hsdp.bench.overhead.options import parse
from ft_hsdp.bench.overhead.steady import steady
from ft_hsdp.bench.overhead.table import show
from ft_hsdp.bench.plan import Log
from ft_hsdp.bench.spread import spread


def test_a_ratio_has_an_interval_around_it() -> None:
    under = [1.0 + 0.01 * (n % 7) for n in range(50)]
    found = times([2 * value for value in under], under)
    assert found == {"ratio": 2.0, "low": 2.0, "high": 2.0}  # what slows both is no difference
    noise = [1.0 + 0.1 * ((n * 7) % 11) for n in range(50)]
    found = times(noise, under)
    assert found["low"] < found["ratio"] < found["high"]


def test_link_is_measured_on_request() -> None:
    assert parse(None, rounds=200).measures == ("steady", "snapshot")
    assert parse("all", rounds=1).measures == ("steady", "snapshot", "link")


def test_goals_and_tables() -> None:
    figures = spread([0.5, 0.6])
    found = {"ratio": 1.05, "low": 1.01, "high": 1.09}
    row: dict[str, Any] = {"replicas": 3, "ranks": 2}
    crews = dict.fromkeys(("hsdp", "hsdp again", "ft_hsdp, tcp"), figures)
    result: dict[str, Any] = {
        "date": "2026-11-21T10:00:00+00:00",
        "machine": {"cpu": "A processor", "cores": 2, "load_1min_before": 0.1, "tcp_congestion_default": "bbr"},
        "versions": {"torch": "2.13.0"},
        "notes": [],
        "steady": [{**row, "crews": crews, "times": dict.fromkeys(("hsdp again", "ft_hsdp, tcp"), found)}],
        "snapshot": [
            {**row, "step": step, "modes": {"without": figures, "with": figures}, "times": {"with": found}}
            for step in ("computing", "waiting")
        ],
        "link": [],
    }
    seen = {verdict.text: (verdict.seen, verdict.met) for verdict in verdicts(result)}
    assert seen == {
        "ft_hsdp, tcp: a step, times HSDP's": (1.05, False),
        "snapshot each step, computing: times as long": (1.05, True),
        "snapshot each step, waiting: times as long": (1.05, False),
    }
    stream = io.StringIO()
    show(result, stream)
    assert max(len(line.rstrip()) for line in stream.getvalue().partition("\n")[2].splitlines()) <= 80


@pytest.mark.proof
@pytest.mark.multiproc
def test_both_train_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sections = {"train": {"micro_batch": 1, "seq_len": 8}, "model": {"dim": 8, "layers": 1, "heads": 1}}
    scene = Scene(replicas=1, ranks=1, sections=sections, waiting=(64, 0.01))
    (row,) = steady(2, Log(io.StringIO()), scene, transports=("tcp",))
    assert {name: crew["count"] for name, crew in row["crews"].items()} == {
        "hsdp": 2,
        "hsdp again": 2,
        "ft_hsdp, tcp": 2,
    }
    assert min(crew["min_ms"] for crew in row["crews"].values()) > 10  # each waits as long as it is told
    assert list(tmp_path.iterdir()) == []
