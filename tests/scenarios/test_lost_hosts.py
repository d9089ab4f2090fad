import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from ft_hsdp.launch.run.directory import RunDir, alive
from ft_hsdp.launch.run.status import status
from tests.support.scenarios.scenario_job import Job
from tests.support.slow_script import write_slow_script


def agents(job: Job, host: str) -> list[int]:
    """The pids of the state agents that a host of replica 0 or 1 has had, in order."""
    log = job.run / "replicas" / (host[1] if host[0] == "r" else "0") / f"agent-{host}.log"
    return [json.loads(line)["pid"] for line in log.read_text().splitlines() if line.startswith("{")]


def kept(pid: int) -> int:
    """How many segments for snapshots a state agent has."""
    found = 0
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found += "memfd:ft_hsdp-state" in os.readlink(f"/proc/{pid}/fd/{descriptor}")
    return found


def test_a_host_is_lost_and_comes_back_empty_and_the_others_train_meanwhile(tmp_path: Path) -> None:
    steps, hosts = 30, {"hosts.per_replica": 2, "hosts.labels": {"r0*": "a/1", "r1h0": "2"}}
    script = tmp_path / "train.py"
    write_slow_script(script, tmp_path / "hurry", 0.8)  # a lost host may be found after `timeouts.evict_s` only
    with Job(tmp_path, steps, replicas=2, entry=str(script), **hosts) as job:
        job.until(lambda: job.step() >= 3, "step 3")
        shown = status(RunDir(job.run))["replicas"]
        assert [[(h["host"], h["ranks"]) for h in r["hosts"]] for r in shown] == [
            [("a/1/r0h0", [0]), ("a/1/r0h1", [1])],
            [("2/r1h0", [0]), ("r1h1", [1])],
        ]
        assert [[rank["host"] for rank in r["ranks"]] for r in shown] == [["r0h0", "r0h1"], ["r1h0", "r1h1"]]
        pids = {host: agents(job, host) for host in ("r0h0", "r0h1", "r1h0", "r1h1")}
        assert len({pid for (pid,) in pids.values()}) == 4, "each host has one agent of its own"
        lost = job.lose_host(0, "r0h1")
        job.until(lambda: job.events("ReplicaExited", replica=0), "the end of the replica")
        assert not alive({"pid": pids["r0h1"][0]}), "the memory of the host is gone"
        assert kept(pids["r0h0"][0]) >= 2, "the other host of the replica keeps its memory"
        job.more(3)
        assert len(job.events("ReplicaStarted", replica=0)) == 1, "it has no place while its host is down"
        lost.lifted("it is back")
        job.until(lambda: len(job.events("ReplicaStarted", replica=0)) == 2, "the second life")
        job.hurry()
        job.ends_well(steps)
        assert [len(agents(job, host)) for host in ("r0h0", "r0h1", "r1h0", "r1h1")] == [1, 2, 1, 1]


@pytest.mark.proof
@pytest.mark.parametrize("second", ["s0", "r0h0"])
def test_another_host_is_lost_during_the_swap(tmp_path: Path, second: str) -> None:
    """The spare host, or one that has what it fetches: the attempt ends as a whole, the next one has what is left.

    The rank on the spare host stands still while it fetches its shard, so it is known when that happens.
    """
    stands = {"fetch": {"replicas": [0], "rank": 1, "life": 1, "step": 0, "signal": "STOP"}}
    hosts = {"ranks_per_replica": 3, "hosts.per_replica": 3, "hosts.spare": 2, "memory.copies": 3}
    with Job(tmp_path, 16, replicas=1, **hosts, **{"debug.failpoints": stands}) as job:
        job.until(lambda: job.step() >= 6 and job.events("Protected"), "copies on all hosts")
        job.lose_host(0, "r0h1")
        job.until(lambda: len(job.events("ReplicaStarted")) == 2, "the second life")
        job.until(lambda: job.stopped(0, 1), "the fetch on the spare host")
        job.lose_host(0, second)
        summary = job.ends_well(16)
        assert [(e["before"], e["host"], e["ranks"]) for e in job.events("HostReplaced")] == [
            ("r0h1", "s0", [1]),
            (second, "s1", [0 if second == "r0h0" else 1]),
        ]
        (recovery,) = summary["recoveries"]
        assert (recovery["number"], recovery["rung"]) == (2, "copy"), "nothing was loaded in the second life"
        assert recovery["lost_steps"] <= 1
        assert recovery["hosts"]["1"] == ("s0" if second == "r0h0" else "s1")


@pytest.mark.proof
def test_a_replica_that_cannot_go_on_lends_its_host(tmp_path: Path) -> None:
    """Replica 0 waits for a host, and replica 1 then loses one: it goes on on replica 0's. Both come back."""
    sections = {"ranks_per_replica": 2, "hosts.per_replica": 2, "timeouts.place_s": 0.3}
    with Job(tmp_path, 200, replicas=2, **sections, **{"quorum.on_lost_head": "rollback"}) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        away = [job.lose_host(0, "r0h1")]
        job.until(lambda: job.events("ReplicaUnplaced"), "replica 0 waits")
        job.more(3)
        away.append(job.lose_host(1, "r1h0"))
        job.until(lambda: job.events("HostLent"), "its host goes to replica 1")
        job.more(3)
        for host in away:
            host.lifted("it is back")
        summary = job.ends_well(200)
        (gave,), (moved,) = job.events("HostLent"), job.events("HostReplaced")
        assert (gave["replica"], gave["host"], gave["to"]) == (0, "r0h0", 1)
        assert (moved["replica"], moved["before"], moved["host"], moved["ranks"]) == (1, "r1h0", "r0h0", [0])
        assert summary["recoveries"][0]["replica"] == 1
        assert summary["recoveries"][0]["lost_steps"] <= 1
        assert summary["replicas"]["0"]["digest"] == summary["replicas"]["1"]["digest"]
