"""A job on a real Ray cluster of four nodes: it loses nodes, goes on smaller, and grows back."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.launch.run.directory import RunDir, read_json
from tests.support.launch.ray_cluster import SLOW, Cluster, Job, kill
from tests.support.slow_script import write_slow_script
from tests.support.started_job import launcher

pytestmark = pytest.mark.multiproc

STEPS = 140  # they must last until replicas are back, on a slow machine, too


def test_nodes_go_and_come(tmp_path: Path) -> None:
    with Cluster() as cluster:
        cluster.add(1, 1, 1, 1)
        with Job(cluster, tmp_path, STEPS, program=SLOW, replicas=3) as job:
            run = RunDir(job.run)
            job.until(lambda: job.contributing() == {0, 1, 2}, "the start")
            lighthouse_looked_at_from_anywhere(cluster)
            secrets_are_kept(cluster, job)

            cluster.remove(job.node_of(1))
            job.until(lambda: job.contributing() == {0, 2}, "the survivors")
            lighthouse = read_json(run.lighthouse)
            os.kill(lighthouse["pid"], signal.SIGKILL)
            job.until(lambda: job.contributing() == {0, 1, 2}, "the replica on another node")
            (restarted,) = job.events("LighthouseExited", over=True)
            again = read_json(run.lighthouse)
            assert (again["url"], again["pid"] != lighthouse["pid"]) == (lighthouse["url"], True)

            cluster.remove(job.node_of(2))
            job.until(lambda: job.events("ReplicaUnplaced", replica=2), "the word that there is no place")
            job.until(lambda: job.events("StartPrevented", replica=2), "the word on what is asked for")
            assert "1 x (CPU 1)" in job.events("StartPrevented", replica=2)[0]["reason"]
            job.more(4)
            assert job.contributing() == {0, 1}
            cluster.add(1)
            job.until(lambda: job.contributing() == {0, 1, 2}, "the replica on the new node")
            job.hurry()
            summary = job.ends_at(STEPS)
        cluster.emptied()
        assert [p.name for p in job.nodes.iterdir()] == [".cache"]
    assert not cluster.processes()
    assert [summary["replicas"][n]["incarnations"] for n in "012"] == [1, 2, 2]
    granted = [e["epoch"] for e in job.events("EpochGranted")]
    assert granted == sorted(set(granted))
    epochs = [row["epoch"] for row in job.rows("metrics.jsonl") if abs(row["t"] - restarted["t"]) < 1]
    assert len(set(epochs)) <= 2  # the lighthouse came back with its journal: no epoch of its own


def lighthouse_looked_at_from_anywhere(cluster: Cluster) -> None:
    done = launcher("status", "--ray-address", cluster.address, "--json", env=cluster.env)
    picture = json.loads(done.stdout)
    assert picture["job"] == "job"
    assert [r["replica"] for r in picture["replicas"]] == [0, 1, 2]
    ranks = [rank for r in picture["replicas"] for rank in r["ranks"]]
    assert all(rank["state"] == "running" and psutil.pid_exists(rank["pid"]) and rank["host"] for rank in ranks)


def secrets_are_kept(cluster: Cluster, job: Job) -> None:
    modules = {"ft_hsdp.launch.backend.zygote", "lighthouse"}
    ours = [process for process, line in cluster.processes().items() if modules & {*line}]
    assert len(ours) >= 7  # three fork servers, their ranks, the lighthouse
    for process in ours:
        assert cluster.token not in process.environ().values()
    private = [p for p in job.nodes.iterdir() if p.name != ".cache"]
    assert len(private) == 3
    assert {p.stat().st_mode & 0o777 for p in private} == {0o700}
    for log in [*job.run.rglob("*"), job.log]:
        assert not log.is_file() or cluster.token.encode() not in log.read_bytes()


@pytest.mark.proof
def test_a_users_script_survives_the_loss_of_a_rank_and_of_a_node(tmp_path: Path) -> None:
    """Each replica is on two nodes. Of the one that loses one of them the other stays, with its state agent."""
    settings: dict[str, Any] = {
        "replicas": 2,
        "ranks_per_replica": 2,
        "entry": "mine.py",
        "train__micro_batch": 16,
        "ray__strategy": "STRICT_SPREAD",
        "timeouts__place_s": 60.0,  # the living node is not given back on a slow machine
    }
    with Cluster() as cluster:
        write_slow_script(tmp_path / "mine.py", cluster.folder / "hurry", 0.8)
        cluster.add(1, 1, rack="7")
        cluster.add(1, 1, rack="8")
        with Job(cluster, tmp_path, STEPS, **settings) as job:
            job.until(lambda: job.step() >= 2 and job.contributing() == {0, 1}, "the start")
            step = job.step()
            kill(job.ranks(1)[1]["pid"])
            job.until(lambda: len(job.events("ReplicaStarted", replica=1)) == 2, "the restart")
            job.until(lambda: job.step() > step + 1 and job.contributing() == {0, 1}, "both replicas")

            (kept, lost), step = job.ranks(1), job.step()
            agent = agent_of(cluster, 1, kept["host"])
            cluster.remove(cluster.node_above(lost["pid"]))
            cluster.add(1, rack="9")
            job.until(lambda: job.contributing() == {0} and job.step() > step, "the other replica")
            job.until(lambda: len(job.events("ReplicaStarted", replica=1)) == 3, "the replica on another node")
            job.until(lambda: job.contributing() == {0, 1}, "both replicas again")
            (replaced,) = job.events("HostReplaced", replica=1)
            new = replaced["host"]
            assert (replaced["before"], replaced["ranks"]) == (lost["host"], [1])
            assert [rank["host"] for rank in job.ranks(1)] == [kept["host"], new]
            assert agent_of(cluster, 1, kept["host"]) == agent
            assert agent_of(cluster, 1, new) != agent
            job.hurry()
            job.ends_at(STEPS)
            assert [s["restarts"] for s in job.events("ReplicaStarted", replica=1)] == [0, 1, 2]
            hosts = [path for e in job.events("EpochGranted") for path, _ in e.get("hosts", {}).get("1", ())]
            assert {path.rpartition("/")[2] for path in hosts} == set(
                map(node_of, (kept["host"], lost["host"], new))
            )
            assert f"9/{node_of(new)}" in hosts
        assert not cluster.ours()


@pytest.mark.proof
def test_a_lone_replica_survives_a_broken_node_and_a_lost_one(tmp_path: Path) -> None:
    """It is on two nodes, which keep copies of each other's shards; there is no other replica."""
    settings: dict[str, Any] = {"replicas": 1, "ranks_per_replica": 2, "ray__strategy": "STRICT_SPREAD"}
    with Cluster() as cluster:
        cluster.add(1, 1, 1)
        with Job(cluster, tmp_path, 20, program=SLOW, restart__backoff_s=0.1, **settings) as job:
            job.until(lambda: job.events("Protected"), "copies")
            job.until(lambda: job.step(), "a step")  # before it a state is made, not fetched
            kept, broken = job.ranks(0)
            agent = agent_of(cluster, 0, kept["host"])
            job.spoil(node_of(broken["host"]))
            job.until(lambda: len(job.events("ReplicaStarted")) == 2, "the rank on another node")
            (cordoned,), (replaced,) = job.events("HostCordoned"), job.events("HostReplaced")
            assert cordoned["host"] == replaced["before"] == broken["host"]
            assert "exit 76" in cordoned["reason"]
            job.until(lambda: len(job.events("Protected")) == 2, "copies again")
            job.more(1)
            assert [rank["host"] for rank in job.ranks(0)] == [kept["host"], replaced["host"]]
            assert agent_of(cluster, 0, kept["host"]) == agent

            cluster.remove(cluster.node_above(job.ranks(0)[0]["pid"]))
            job.until(lambda: job.events("ReplicaUnplaced"), "the word that there is no place")
            job.until(lambda: job.events("StartPrevented"), "the word on what is asked for")
            assert f"; cordoned: {node_of(broken['host'])}" in job.events("StartPrevented")[0]["reason"]
            cluster.add(1)
            job.until(lambda: len(job.events("ReplicaStarted")) == 3, "the rank on the new node")
            job.more(1)
            job.hurry()
            summary = job.end()
        cluster.emptied()
    counted = summary["batches"]
    assert (summary["steps"], counted["duplicated"], counted["skipped"]) == (20, 0, 0)
    # The line of the newest step may be lost with its node.
    assert counted["trained"] + counted.get("unlogged", 0) == 20 * 2
    assert counted.get("unlogged", 0) in ((0, 2) if job.events("LogCut") else (0,))
    restored = [r for r in summary["recoveries"] if r["number"]]
    assert [(r["rung"], r["lost_steps"] <= 1) for r in restored] == [("copy", True)] * 2
    assert node_of(broken["host"]) not in restored[1]["hosts"].values()


def node_of(host: str) -> str:
    """The name of a host's node, by which ranks know it."""
    return host.rpartition("-r")[0]


def agent_of(cluster: Cluster, replica: int, host: str) -> int:
    """The pid of a replica's state agent on a host."""
    words = ["--replica", str(replica), "--name", node_of(host)]
    found = [
        process
        for process, line in cluster.processes().items()
        if "ft_hsdp.state.agent.server" in line and all(word in line for word in words)
    ]
    assert len(found) == 1, found
    return found[0].pid
