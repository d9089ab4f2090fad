"""The disk of the run directory is full while a job trains: it costs lines, which are told, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.status import status
from ft_hsdp.sentences import tell
from tests.support.scenarios.scenario_job import Job, check

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.proof,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own"),
]
SIZE = "24m"


@contextmanager
def small_disk(folder: Path) -> Iterator[int]:
    """A file system of `SIZE` at ``folder`` that only a process and its children see: the pid of that process."""
    folder.mkdir()
    script = 'mount -t tmpfs -o size=$1 small "$2" && echo ready && exec sleep 600'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", SIZE, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            yield holder.pid
        finally:
            holder.kill()


def fill(file: Path) -> None:
    """Take all the space that there is."""
    with file.open("wb", buffering=0) as filler:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while filler.write(b"x" * size) == size:
                    pass
            except OSError:
                pass


def test_training_goes_on_and_what_the_logs_lack_is_told(tmp_path: Path) -> None:
    steps = 90
    with small_disk(tmp_path / "runs") as holder, Job(tmp_path, steps, holder) as job:

        def step() -> int:
            """The newest step, as the lighthouse knows it: no file can tell it."""
            return int(status(RunDir(job.run))["step"])

        filler = job.run.parent / "filler"
        job.until(lambda: job.step() >= 10, "step 10")
        fill(filler)
        full_at = step()
        job.until(lambda: step() >= full_at + 50, "the job goes on")
        filler.unlink()
        summary = job.end()
        check(summary, steps)
        assert {r["incarnations"] for r in summary["replicas"].values()} == {1}, "somebody was restarted"
        lost = job.events("LogLinesLost", file="fed.jsonl", source="replica")
        assert lost, "nobody told what the logs lack"
        assert "its disk was full" in tell(lost[0])
        assert summary["batches"]["unlogged"] > 0


@pytest.mark.soak
def test_a_lighthouse_decides_on_a_full_disk(tmp_path: Path) -> None:
    """A rank is killed on a full disk that stays full: a new epoch is granted, the replica heals, the job ends."""
    steps = 90
    with small_disk(tmp_path / "runs") as holder, Job(tmp_path, steps, holder) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        fill(job.run.parent / "filler")
        job.signal(1, 1, signal.SIGKILL)
        job.process.wait(120)
        assert job.process.returncode == 0, job.tail()
        assert "all 3 replicas equal" in job.tail()
