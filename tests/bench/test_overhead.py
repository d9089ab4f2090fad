from __future__ import annotations

import io

import pytest

from benchmarks import overhead
from benchmarks.jobs import TRAIN, WAITING, Setup
from benchmarks.results import ProgressLog, ratio_interval


def test_a_ratio_has_an_interval_around_it() -> None:
    under = [1.0 + 0.01 * (n % 7) for n in range(50)]
    found = ratio_interval([2 * value for value in under], under)
    assert found == {"ratio": 2.0, "low": 2.0, "high": 2.0}  # what slows both is no difference
    noise = [1.0 + 0.1 * ((n * 7) % 11) for n in range(50)]
    found = ratio_interval(noise, under)
    assert found["low"] < found["ratio"] < found["high"]


@pytest.mark.proof
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_both_train_in_turn() -> None:
    sections = {"train": {**TRAIN, "micro_batch": 1, "seq_len": 8}}
    setup = Setup(replicas=1, model=WAITING, layers=1, elements=64, wait_s=0.01, sections=sections)
    (row,) = overhead.steady(2, ProgressLog(io.StringIO()), setup, transports=("tcp",))
    assert {name: crew["count"] for name, crew in row["crews"].items()} == {
        "hsdp": 2,
        "hsdp again": 2,
        "ft_hsdp, tcp": 2,
    }
    assert {"MainThread", "ftar", "control"} <= row["cpu_ms"]["ft_hsdp, tcp"].keys()
    assert row["cpu_times"]["hsdp"] == 1
    assert min(crew["min_ms"] for crew in row["crews"].values()) > 10  # each waits as long as it is told
