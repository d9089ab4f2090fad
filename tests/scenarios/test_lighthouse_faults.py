"""The lighthouse is killed, kept away, stopped, or loses its lead: training goes on under its lease."""

import contextlib
import os
import signal
import socket
import statistics
import time
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from lighthouse.http.access import view_key
from tests.support.etcd_server import EtcdServer
from tests.support.running import running
from tests.support.scenarios.scenario_job import HARD, Job, everything_is_told

AWAY_S = 2.0


def keep_away(job: Job, seconds: float) -> None:
    """SIGKILL the lighthouse, and each that is started in its place, for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for process, line in running(job.process.pid).items():
            if "lighthouse" in line:  # as a module's name
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.01)


def idle(job: Job, since: float, until: float) -> float:
    """The part of a time that is the longest one without a commit: near 1 if a step needs a lighthouse."""
    times = [row["t"] for row in job.rows("metrics.jsonl")]
    during = [since, *(t for t in times if since < t < until), until]
    longest = max(after - before for before, after in pairwise(during))
    print(f"{len(during) - 2} steps in {until - since:.2f} s, the longest without a commit {longest:.2f} s")
    return longest / (until - since)


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
        os.kill(job.lighthouse()["pid"], signal.SIGKILL)
        at = job.step()
        job.more(5)
        job.signal(2, 1, signal.SIGKILL)
        job.ends_well(steps)
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


@pytest.mark.proof
def test_two_seconds_without_a_lighthouse_stall_no_step(tmp_path: Path) -> None:
    """It comes back at its address, and the epoch goes on; the launcher needs about a second to start it."""
    steps = 120  # they must last until it is back, on a fast machine, too
    with Job(tmp_path, steps) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        before = job.lighthouse()
        began = time.time()
        keep_away(job, AWAY_S)
        killed_last = time.time()
        job.until(
            lambda: job.lighthouse()["pid"] != before["pid"] and psutil.pid_exists(job.lighthouse()["pid"]),
            "it is back",
        )
        print(f"back {time.time() - killed_last:.2f} s after the last kill")
        assert job.lighthouse()["url"] == before["url"]
        job.ends_at(steps)
        assert idle(job, began, killed_last + 1.0) < 0.5
        assert epochs(job) == {1}
        assert len(job.events("ReplicaStarted")) == 3, "somebody exited"


@pytest.mark.soak
def test_a_lighthouse_that_hangs_stalls_no_step(tmp_path: Path) -> None:
    """It takes connections and answers nothing: no step waits for it, and it is heard again when it goes on."""
    steps = 120
    with Job(tmp_path, steps) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        pid = job.lighthouse()["pid"]
        began = time.time()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(AWAY_S)
        ended = time.time()
        os.kill(pid, signal.SIGCONT)
        job.signal(1, 0, signal.SIGKILL)
        job.ends_at(steps)
        assert idle(job, began, ended) < 0.5
        assert {r["epoch"] for r in job.rows("metrics.jsonl") if r["t"] <= ended} == {1}
        assert job.rows("metrics.jsonl")[-1]["contributors"] == [0, 1, 2], "nobody joined afterwards"


@pytest.mark.proof
def test_the_death_of_an_elected_leader_does_not_touch_training(tmp_path: Path) -> None:
    """Another one leads within the lease; a replica that dies later is replaced by its grants."""
    steps = 150  # they must last until another one leads, on a fast machine, too
    with EtcdServer() as etcd, Job(tmp_path, steps, lighthouse__etcd=[etcd.url], lighthouse__count=2) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        before = job.lighthouse()
        assert len(before["urls"]) == 2
        began = time.time()
        os.kill(before["pid"], signal.SIGKILL)
        job.until(lambda: job.lighthouse()["pid"] != before["pid"], "another one leads", 15.0)  # maybe its heir
        took = time.time() - began
        print(f"another one leads after {took:.2f} s")
        job.signal(2, 1, signal.SIGKILL)
        job.ends_at(steps)
        assert idle(job, began, began + took) < 0.5
        assert {r["epoch"] for r in job.rows("metrics.jsonl") if r["t"] <= began + took} == {1}
        assert job.rows("metrics.jsonl")[-1]["contributors"] == [0, 1, 2]
        terms = [e["term"] for e in job.events("LighthouseElected")]
        assert terms == sorted(set(terms))
        assert len(terms) >= 2


# One connection of a real job never comes about, although both of its ends reach the lighthouse.


BOUND_S = 30.0


def until_steps_again(job: Job, members: int) -> None:
    """The edge breaks, and a ring without it commits steps within the bound."""
    job.until(lambda: job.events("FailureInjected"), "the edge is cut")
    (cut,) = job.events("FailureInjected")
    job.until(lambda: job.events("EdgeBroken"), "the lighthouse tells of it", BOUND_S)
    (broken,) = job.events("EdgeBroken")
    assert broken["replicas"] == [0, 1]
    job.until(lambda: len(job.events("EpochGranted")[-1]["members"]) == members, "a ring without it", BOUND_S)
    job.more(1, BOUND_S)
    assert job.events("RingConnected")[-1]["t"] - cut["t"] < BOUND_S
    storm = [e for e in job.events("EpochGranted") if cut["t"] <= e["t"] <= cut["t"] + 10.0]
    assert len(storm) < 12, "epochs without a step come at a pace"


@pytest.mark.proof
def test_one_of_three_is_left_out(tmp_path: Path) -> None:
    """Its neighbour refuses connections."""
    cut = {"kind": "partition", "edge": [0, 1], "at_step": 5, "for_s": 0, "reject": True}
    with Job(tmp_path, 40, ranks_per_replica=1, chaos=[cut]) as job:
        until_steps_again(job, 2)
        job.ends_well(40)
        assert job.events("EdgeBroken")[0]["excluded"] == 1
        assert len(job.events("ReplicaStarted")) == 3, "nobody exits"


def test_a_thousand_viewers_and_strangers_keep_no_replica_out(tmp_path: Path) -> None:
    """They hold all the connections that they get while a replica is killed: it comes back."""
    steps = 60
    with Job(tmp_path, steps, ranks_per_replica=1) as job, contextlib.ExitStack() as held:
        job.until(lambda: job.step() >= 5, "step 5")
        said = job.lighthouse()
        where = urlsplit(said["url"])
        key = view_key((job.run / "token").read_text().strip())
        ask = f"GET /v1/status HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode()
        for n in range(1000):
            sock = held.enter_context(socket.create_connection((where.hostname, where.port), 5))
            with contextlib.suppress(OSError):  # closed for want of a place
                sock.sendall(ask if n % 4 else b"")
        job.signal(1, 0, signal.SIGKILL)
        job.until(lambda: job.events("ReplicaStarted", replica=1, restarts=1), "it is started again")
        job.until(lambda: 1 in job.contributing(), "it contributes again")
        summary = job.ends_at(steps)
        assert summary["replicas"]["1"]["incarnations"] == 2
        assert job.lighthouse()["pid"] == said["pid"], "the lighthouse was restarted"
