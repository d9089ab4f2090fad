"""The lighthouse is killed, kept away, stopped, or loses its lead: training goes on under its lease."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.etcd_server import EtcdServer
from tests.support.scenarios.scenario_job import HARD, Job, check, everything_is_told

pytestmark = pytest.mark.multiproc
AWAY_S = 2.0


def leader(job: Job) -> dict[str, Any]:
    """What lighthouse.json says."""
    said: dict[str, Any] = json.loads((job.run / "lighthouse.json").read_text())
    return said


def keep_away(job: Job, seconds: float) -> None:
    """SIGKILL the lighthouse, and each that is started in its place, for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for process in psutil.Process(job.process.pid).children(recursive=True):
            try:
                if "lighthouse" in process.cmdline():  # as a module's name; a spare, too
                    process.kill()
            except psutil.Error:
                continue
        time.sleep(0.01)


def stalled(job: Job, since: float, until: float) -> list[dict[str, Any]]:
    """The steps between two times that took more than twice the median, and waited for the lighthouse."""
    rows = job.rows("metrics.jsonl")
    median = statistics.median(r["step_s"] for r in rows)
    during = [r for r in rows if since <= r["t"] <= until]
    assert during, "no step was committed meanwhile"
    waits = [r["waits"].get("quorum", 0.0) for r in during]
    print(f"median step {median:.3f} s; {len(during)} steps meanwhile, exposed waits {sum(waits):.3f} s in sum")
    return [
        r
        for r, wait in zip(during, waits, strict=True)
        if r["step_s"] > 2 * median and wait > r["step_s"] - median
    ]


def epochs(job: Job) -> set[int]:
    return {r["epoch"] for r in job.rows("metrics.jsonl")}


def test_training_goes_on_and_the_epoch_stays(tmp_path: Path) -> None:
    """Nobody exits, no epoch is lost; a replica that dies meanwhile heals once the lighthouse is back.

    The lighthouse hears all that the processes write down, and no step waits for that.
    """
    steps = 32
    with Job(tmp_path, steps, **HARD) as job:
        everybody = {(replica, rank) for replica in range(3) for rank in range(2)}
        job.until(lambda: set(job.progress()) == everybody, "all ranks are heard")
        heard = job.progress()
        job.until(lambda: all(now > heard[rank] for rank, now in job.progress().items()), "all get on")
        job.until(lambda: job.step() >= 5, "step 5")
        os.kill(leader(job)["pid"], signal.SIGKILL)
        at = job.step()
        job.until(lambda: job.step() >= at + 5, "training goes on")
        job.signal(2, 1, signal.SIGKILL)
        summary = job.end()
        check(summary, steps)
        rows = job.rows("metrics.jsonl")
        before = {r["epoch"] for r in rows if r["step"] <= at + 4}
        assert before == {1}, "the lighthouse's death changed the epoch"
        assert rows[-1]["contributors"] == [0, 1, 2], "replica 2 did not come back"
        terms = [e["term"] for e in job.events("EpochGranted")]
        assert terms == sorted(terms)
        assert terms[-1] > terms[0], "the new lighthouse has no higher term"
        everything_is_told(job, {job.events("ReplicaStarted", replica=2)[0]["incarnation"]})
        waits = [row["waits"]["quorum"] for row in rows]
        print(f"exposed wait for the lighthouse: median {statistics.median(waits) * 1e3:.3f} ms, {waits}")
        assert statistics.median(waits) < 0.001
        assert job.replayed()["equal"]


@pytest.mark.proof
def test_two_seconds_without_a_lighthouse_stall_no_step(tmp_path: Path) -> None:
    """It comes back at its address, and the epoch goes on; the launcher needs about a second to start it."""
    steps = 120  # they must last until it is back, on a fast machine, too
    with Job(tmp_path, steps) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        before = leader(job)
        began = time.time()
        keep_away(job, AWAY_S)
        killed_last = time.time()
        job.until(
            lambda: leader(job)["pid"] != before["pid"] and psutil.pid_exists(leader(job)["pid"]), "it is back"
        )
        print(f"back {time.time() - killed_last:.2f} s after the last kill")
        assert leader(job)["url"] == before["url"]
        check(job.end(), steps)
        assert not stalled(job, began, killed_last + 1.0)
        assert epochs(job) == {1}
        assert len(job.events("ReplicaStarted")) == 3, "somebody exited"


@pytest.mark.soak
def test_a_killed_rank_and_a_killed_lighthouse_cost_no_row(tmp_path: Path) -> None:
    steps = 100  # they must last until it is back, on a fast machine, too
    with Job(tmp_path, steps) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        job.signal(1, 1, signal.SIGKILL)
        job.until(lambda: len(job.events("Rejoined", replica=1)) > 0, "it is back")
        os.kill(leader(job)["pid"], signal.SIGKILL)
        check(job.end(), steps)
        everything_is_told(job)


@pytest.mark.soak
def test_a_lighthouse_that_hangs_stalls_no_step(tmp_path: Path) -> None:
    """It takes connections and answers nothing: no step waits for it, and it is heard again when it goes on."""
    steps = 120
    with Job(tmp_path, steps) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        pid = leader(job)["pid"]
        began = time.time()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(AWAY_S)
        ended = time.time()
        os.kill(pid, signal.SIGCONT)
        job.signal(1, 0, signal.SIGKILL)
        check(job.end(), steps)
        assert not stalled(job, began, ended)
        assert {r["epoch"] for r in job.rows("metrics.jsonl") if r["t"] <= ended} == {1}
        assert job.rows("metrics.jsonl")[-1]["contributors"] == [0, 1, 2], "nobody joined afterwards"


@pytest.mark.proof
def test_the_death_of_an_elected_leader_does_not_touch_training(tmp_path: Path) -> None:
    """Another one leads within the lease; a replica that dies later is replaced by its grants."""
    steps = 150  # they must last until another one leads, on a fast machine, too
    with EtcdServer() as etcd, Job(tmp_path, steps, lighthouse__etcd=[etcd.url], lighthouse__count=2) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        before = leader(job)
        assert len(before["urls"]) == 2
        began = time.time()
        os.kill(before["pid"], signal.SIGKILL)
        job.until(lambda: leader(job)["pid"] != before["pid"], "another one leads", 15.0)  # maybe its heir
        took = time.time() - began
        print(f"another one leads after {took:.2f} s")
        job.signal(2, 1, signal.SIGKILL)
        check(job.end(), steps)
        assert not stalled(job, began, began + took)
        assert {r["epoch"] for r in job.rows("metrics.jsonl") if r["t"] <= began + took} == {1}
        assert job.rows("metrics.jsonl")[-1]["contributors"] == [0, 1, 2]
        terms = [e["term"] for e in job.events("LighthouseElected")]
        assert terms == sorted(set(terms))
        assert len(terms) >= 2


@pytest.mark.soak
def test_three_seconds_without_etcd_do_not_touch_training(tmp_path: Path) -> None:
    steps = 150
    with EtcdServer() as etcd, Job(tmp_path, steps, lighthouse__etcd=[etcd.url], lighthouse__count=2) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        began = time.time()
        etcd.kill()
        time.sleep(3.0)
        etcd.start()
        ended = time.time()
        job.until(lambda: len(job.events("LighthouseElected")) >= 2, "somebody leads again", 30.0)
        job.signal(0, 1, signal.SIGKILL)
        check(job.end(), steps)
        assert not stalled(job, began, ended)
        assert {r["epoch"] for r in job.rows("metrics.jsonl") if r["t"] <= ended} == {1}
        assert job.events("LighthouseDeposed")
        assert job.rows("metrics.jsonl")[-1]["contributors"] == [0, 1, 2]
