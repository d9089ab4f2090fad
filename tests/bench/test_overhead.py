from __future__ import annotations

import io
import re
import threading
import time

import pytest

from benchmarks import overhead
from benchmarks.flame import Sampler, draw
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


def test_a_flame_graph_shows_each_function_once_with_all_that_it_calls() -> None:
    graph = draw({"main;a;b": 30.0, "main;a": 10.0, "main;a;c": 20.0, "other;a": 40.0}, "a step")
    assert "a step: 100 ms" in graph
    said = re.findall(r"<title>(.*?)</title>.*?x=\"([\d.]+)\"", graph)
    assert [(text, float(x)) for text, x in said] == [
        ("main: 60.0 ms, 60.0 %", 0.0),
        ("a: 60.0 ms, 60.0 %", 0.0),
        ("b: 30.0 ms, 30.0 %", 0.0),
        ("c: 20.0 ms, 20.0 %", 480.0),
        ("other: 40.0 ms, 40.0 %", 960.0),
        ("a: 40.0 ms, 40.0 %", 960.0),
    ]


def test_the_sampler_counts_what_computes_and_not_what_waits() -> None:
    def spin() -> None:
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            sum(range(1000))

    waiting = threading.Event()
    threads = [threading.Thread(target=spin, name="spins-1"), threading.Thread(target=waiting.wait, name="waits")]
    sampler = Sampler()
    sampler.start()
    for thread in threads:
        thread.start()
    threads[0].join()
    waiting.set()
    found = sampler.stop()
    assert sum(us for stack, us in found.items() if stack.startswith("spins;") and ".spin" in stack) > 100_000
    assert sum(us for stack, us in found.items() if stack.startswith("waits;")) < 20_000
