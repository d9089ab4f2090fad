from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import under_ray
from ft_hsdp.bench.jobs import Setup
from ft_hsdp.bench.results import ProgressLog
from tests.support.running import running

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_job_takes_a_turn_under_each_launcher() -> None:
    pytest.importorskip("ray")
    setup = Setup(replicas=2, layers=1, elements=256, wait_s=0.02)
    (row,) = under_ray.ray(1, ProgressLog(io.StringIO()), setup, steps=3)
    assert {name: found["count"] for name, found in row["launchers"].items()} == {"up": 1, "ray": 1}
    assert min(found["min_ms"] for found in row["launchers"].values()) > 20  # each waits as long as it is told


@pytest.mark.soak
@pytest.mark.multiproc
@pytest.mark.usefixtures("_nothing_left")
def test_a_cluster_ends_with_the_bench() -> None:
    """Ctrl-C while the job trains on it."""
    pytest.importorskip("ray")
    command = [sys.executable, "launcher.py", "bench", "ray", "--rounds", "9"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if ", ray: a step of" in line:  # the next turn is Ray's as well
                    break
            deadline = time.monotonic() + 60
            while not any("RankActor" in " ".join(line) for line in running(process.pid).values()):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(90) == 130
            assert process.stderr.read().splitlines()[-1] == "stopped"
        finally:
            process.kill()
