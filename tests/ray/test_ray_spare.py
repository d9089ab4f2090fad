"""A job on a real Ray cluster with a warm spare: a replica whose node is lost goes on as that."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_hsdp.launch.ray.actor import OWNER
from ft_hsdp.launch.run.directory import alive, read_json
from tests.ray.test_ray_submit import audit
from tests.support.launch.ray_cluster import SLOW, Cluster, Job, kill

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]

STEPS = 240  # they must last until replicas are back, on a slow machine, too
WARM = "from a spare"


def test_a_replica_whose_node_is_lost_goes_on_in_a_spare(tmp_path: Path) -> None:
    with Cluster() as cluster:
        cluster.add(1, 1, 1)
        with Job(cluster, tmp_path, STEPS, program=SLOW, replicas=2, spares=1, restart__hold_s=0.2) as job:
            job.until(lambda: job.events("SpareWarmed"), "a spare")
            kill(job.ranks(0)[0]["pid"])  # its node lives, and is the next spare's
            job.until(lambda: job.events("ReplicaStarted", replica=0, how=WARM), "the move")
            job.until(lambda: len(job.events("SpareWarmed")) == 2, "a spare in its old place")
            assert len(cluster.ask()["groups"]) == 3
            assert job.contribute(0, 1)

            cluster.remove(job.node_of(1))
            job.until(lambda: job.events("ReplicaStarted", replica=1, how=WARM), "the move to another node")
            job.until(lambda: job.contribute(0, 1), "the replica there")
            job.until(lambda: len(cluster.ask()["groups"]) == 3, "a spare that looks for a place")
            step = job.newest()["step"]
            job.until(lambda: job.newest()["step"] > step + 2, "steps meanwhile")
            assert not job.events("SpareLost")
            job.hurry()
            summary = job.end()
        after = cluster.ask()
        assert (after["actors"], after["groups"]) == ([], [])
        assert not cluster.ours()
        left = [p for p in job.nodes.iterdir() if p.name != ".cache"]
        assert len(left) == 1  # of the actor that was lost with its node: who comes there next sweeps it
        assert not alive(read_json(left[0] / OWNER))
    audit(summary, STEPS)
    assert [summary["replicas"][n]["incarnations"] for n in "01"] == [2, 2]
    called = [e["pids"] for e in job.events("ReplicaStarted", how=WARM)]
    assert called == [e["pids"] for e in job.events("SpareWarmed")]
    assert called[0] != called[1]
    assert read_json(job.run / "spares" / "spares.json") == {"spares": []}
