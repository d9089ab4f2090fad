"""Odd files in the folders of a job while it trains: it ends with one state, and every reader says what is odd."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fuzz.test_files import DAMAGES, SEEDS, files, pipe
from tests.support.scenarios.scenario_job import Job

pytestmark = pytest.mark.multiproc
DAMAGED_UNTIL = 30  # step


def step(job: Job) -> int:
    """The newest step on the job's terminal: its files may be pipes."""
    return max(map(int, re.findall(r"step (\d+)/", job.log.read_text(errors="replace"))), default=0)


def end(job: Job) -> str:
    """Wait for the end of a job; return what it has printed."""
    job.until(lambda: job.process.poll() is not None, "the end", deadline_s=150)
    said = job.log.read_text(errors="replace")
    assert job.process.returncode in (0, 75), said  # 75: its last checkpoint is one of the files
    assert "Traceback" not in said
    assert "all 3 replicas equal" in said
    assert " 0 twice" in said
    return said


def test_a_pipe_in_the_place_of_each_file_hangs_nobody(tmp_path: Path) -> None:
    """Also of those to which a process that runs appends, or which it writes at its end."""
    with Job(tmp_path, DAMAGED_UNTIL, ranks_per_replica=1) as job:
        job.until(lambda: step(job) >= 5, "step 5")
        for name in files(job.run / "replicas" / "1"):
            pipe(job.run / "replicas" / "1" / name, random.Random())
        assert " 0 skipped" in end(job), "what a log lacks is not known to be skipped"


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_whose_files_are_damaged_again_and_again_ends_well(tmp_path: Path, seed: int) -> None:
    chance, kept = random.Random(seed), tmp_path / "kept"
    with Job(tmp_path, 60, **{"checkpoint.dir": str(kept), "checkpoint.every": 10}, ranks_per_replica=1) as job:
        job.until(lambda: step(job) >= 5, "step 5")
        for at in range(6, DAMAGED_UNTIL):
            job.until(lambda at=at: step(job) >= at, f"step {at}")
            below = chance.choice([job.run, job.run, kept])
            name = chance.choice(files(below))
            with suppress(OSError):  # it is gone
                chance.choice(DAMAGES)(below / name, chance)
        end(job)
