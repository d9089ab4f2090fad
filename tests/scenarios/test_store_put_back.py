"""The store of a running job's lighthouse is put back from an older copy: training goes on."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import psutil
import pytest

from tests.scenarios.test_lighthouse_dies import leader
from tests.support.scenarios.scenario_job import Job, check

pytestmark = pytest.mark.multiproc


def copy(store: Path, to: Path) -> None:
    """A copy of a store that is in use."""
    with sqlite3.connect(store) as source, sqlite3.connect(to) as target:
        source.backup(target)
    source.close()
    target.close()


def put_back(job: Job, copied: Path) -> None:
    """SIGKILL the lighthouse and have the next one find ``copied``; nothing starts one meanwhile."""
    store = job.run / "lighthouse" / "store.sqlite"
    pid = leader(job)["pid"]
    os.kill(job.process.pid, signal.SIGSTOP)
    try:
        os.kill(pid, signal.SIGKILL)
        job_lighthouse = psutil.Process(pid)
        while psutil.pid_exists(pid) and job_lighthouse.status() != psutil.STATUS_ZOMBIE:
            pass
        for suffix in ("-wal", "-shm"):
            store.with_name(store.name + suffix).unlink(missing_ok=True)
        copied.replace(store)
    finally:
        os.kill(job.process.pid, signal.SIGCONT)


@pytest.mark.soak
def test_an_older_copy_is_recognised_and_training_goes_on(tmp_path: Path) -> None:
    """Two epochs are granted between the copy and its return; the members know them, the store does not."""
    steps = 120
    with Job(tmp_path, steps) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        copied = tmp_path / "copy.sqlite"
        copy(job.run / "lighthouse" / "store.sqlite", copied)
        job.signal(2, 1, signal.SIGKILL)
        job.until(lambda: len(job.events("EpochGranted")) >= 3, "replica 2 is back")
        job.until(lambda: job.contributing() == {0, 1, 2}, "all contribute")
        newest = max(e["epoch"] for e in job.events("EpochGranted"))
        put_back(job, copied)
        at = job.step()
        job.until(lambda: job.events("StoreBehind"), "the older copy is recognised")
        job.until(lambda: job.step() >= at + 5, "training goes on", 30.0)
        check(job.end(), steps)
        (behind,) = job.events("StoreBehind")
        assert (behind["store_epoch"], behind["epoch"]) == (1, newest)
        after = [e for e in job.events("EpochGranted") if e["t"] > behind["t"]]
        assert after[0]["epoch"] > newest
        assert after[0]["members"] == [0, 1, 2]
        assert len(job.events("ReplicaStarted")) == 4, "somebody exited"
        assert job.replayed()["equal"]
