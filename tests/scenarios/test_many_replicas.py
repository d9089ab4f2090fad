"""The paper's number of replicas on this machine, while one to three of them at a time are killed."""

import random
import signal
from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import Job
from tests.support.started_job import launcher

ENDS_S = 900.0  # with 24 processes on two cores
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("replicas", "ranks", "steps"), [(12, 1, 400), (16, 1, 250), (12, 2, 150)])
def test_kills_of_several_replicas_at_a_time(replicas: int, ranks: int, steps: int, tmp_path: Path) -> None:
    """All that are killed come back, whatever else is lost meanwhile, and all end equal."""
    chance, killed = random.Random(replicas * ranks), 0
    settings = {"replicas": replicas, "ranks_per_replica": ranks, "restart__budget": 1000}
    with Job(tmp_path, steps, **settings) as job:
        job.until(lambda: len(job.contributing()) == replicas, "all contribute", ENDS_S)
        while job.step() < 0.8 * steps:
            for victim in chance.sample(sorted(job.contributing()), chance.choice([1, 1, 2, 3])):
                job.signal(victim, chance.randrange(ranks), signal.SIGKILL)
                killed += 1
            job.more(chance.randint(1, steps // 10), ENDS_S)
        summary = job.ends_well(steps, ENDS_S)
        assert sum(r["incarnations"] - 1 for r in summary["replicas"].values()) == len(summary["failures"])
        assert killed >= len(summary["failures"]) >= 8
        print(f"{replicas} x {ranks}: {killed} ranks killed in {steps} steps", job.tail(), sep="\n")
        print(launcher("goodput", str(job.run)).stdout)
