"""What `render slurm` prints, on a real Slurm: two replicas train, elements leave and come back, all jobs end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.config import parse
from ft_hsdp.launch.backend.processes import environment
from ft_hsdp.launch.render.settings import Site
from ft_hsdp.launch.render.slurm import slurm
from tests.support.aborted import aborted
from tests.support.launch.slurm_cluster import SlurmCluster

STEPS = 3000  # they must last until elements are back in the queue and out again
DEADLINE_S = 120.0
JOB = {
    "job": {"name": "tiny"},
    "replicas": 2,
    "ranks_per_replica": 1,
    "train": {"steps": STEPS, "micro_batch": 2, "seq_len": 32},
    "model": {"dim": 64, "layers": 2, "heads": 2},
    "data": {"max_bytes": 2**20},
}


class Submitted:
    """A job that was rendered and given to a cluster."""

    def __init__(self, cluster: SlurmCluster, folder: Path, job: dict[str, Any], site: Site) -> None:
        self._cluster = cluster
        self._runs = folder / "runs"
        self.run = self._runs / "tiny"
        script = folder / "job.sh"
        script.write_text(slurm(parse({**job, "job": {"name": "tiny", "runs_dir": str(self._runs)}}), site))
        cluster.environment.update({"PYTHONPATH": environment()["PYTHONPATH"]})
        self.array = cluster.run("bash", str(script)).partition("replicas ")[2].partition(";")[0]

    def rows(self, replica: int, name: str = "commits.jsonl") -> list[dict[str, Any]]:
        file = self.run / f"replicas/{replica}" / name
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def events(self) -> list[dict[str, Any]]:
        return [row for replica in range(2) for row in self.rows(replica, "events.jsonl")]

    def log(self, replica: int) -> str:
        return (self._runs / f"tiny-slurm-{replica}.log").read_text()

    def ranks(self) -> dict[int, dict[str, str]]:
        """The environments of all ranks that torchrun has started, by pid."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                said = process.environ()
                if "RANK" in said and any(str(self._runs) in word for word in process.cmdline()):
                    found[process.pid] = said
        return found

    def goes_and_comes_back(self, replica: int) -> None:
        """Wait until the other one has trained alone since now, and then both have."""
        other, seen = 1 - replica, len(self.rows(1 - replica))
        self.until(
            lambda: [other] in [r["contributors"] for r in self.rows(other)[seen:]], "the other goes on alone"
        )
        before = len(self.rows(replica))
        self.until(lambda: len(self.rows(replica)) > before + 10, "it is back")

    def trains_to_the_end(self) -> None:
        """Wait for the last step as long as steps are made, and then for the end of all jobs."""
        while (step := self.rows(0)[-1]["step"]) < STEPS:
            self.until(lambda step=step: self.rows(0)[-1]["step"] > step, f"a step after {step}")
        self.ends()

    def ends(self) -> None:
        self.until(lambda: not self._cluster.run("squeue", "--noheader"), "all jobs end, the lighthouse's too")

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            self._cluster.until(condition, what, DEADLINE_S)
        except AssertionError as error:
            logs = {p.name: p.read_text(errors="replace")[-1000:] for p in self._runs.glob("*.log")}
            raise AssertionError(f"{error}\n{len(self.rows(0))}, {len(self.rows(1))} steps\n{logs}") from None


@pytest.mark.timeout(600)
@pytest.mark.multiproc
@pytest.mark.soak
def test_elements_leave_and_come_back_on_a_real_slurm(tmp_path: Path) -> None:
    with SlurmCluster() as cluster:
        job = Submitted(cluster, tmp_path, JOB, Site(python=sys.executable))
        job.until(lambda: len(job.rows(0)) >= 10 and len(job.rows(1)) >= 10, "both train")

        # Slurm's clock: it leaves after its step, and comes back in its place in the queue.
        cluster.run("scancel", "--batch", "--signal=USR1", f"{job.array}_1")
        job.goes_and_comes_back(1)

        # An operator, or preemption: Slurm tells every process to end, and kills after KillWait what did not.
        cluster.run("scontrol", "requeue", f"{job.array}_0")
        job.goes_and_comes_back(0)
        job.trains_to_the_end()

    finals = [json.loads((job.run / f"replicas/{n}/final.json").read_text()) for n in range(2)]
    assert {final["step"] for final in finals} == {STEPS}
    assert len({final["digest"] for final in finals}) == 1
    assert "replica 1: its time limit is reached; requeued" in job.log(1)
    assert not [n for n in range(2) if "SIGKILL" in job.log(n)], "told to end, they leave by themselves"
    assert aborted(job.events()) == []
    assert oct(os.stat(job.run / "token").st_mode)[-3:] == "600"


@pytest.mark.timeout(600)
@pytest.mark.multiproc
@pytest.mark.soak
def test_a_replica_on_two_nodes_starts_again_on_both_and_leaves_both(tmp_path: Path) -> None:
    sizes = {"ranks_per_replica": 2, "network": {"allow": ["127.0.0.0/8"]}}
    endless = {"train": {**JOB["train"], "steps": 100_000}}
    with SlurmCluster(nodes=2) as cluster:
        job = Submitted(
            cluster, tmp_path, {**JOB, **sizes, **endless}, Site(python=sys.executable, nodes=2, cpus=2)
        )
        job.until(lambda: len(job.rows(0)) >= 10 and len(job.rows(1)) >= 10, "both train")

        # Told by Slurm's clock, all of its ranks leave.
        cluster.run("scancel", "--batch", "--signal=USR1", f"{job.array}_1")
        job.goes_and_comes_back(1)
        assert "LeaveRequested" in {e["event"] for e in job.events()}
        assert aborted(job.events()) == []

        # One rank dies: srun ends the other node's, and both start again.
        ranks = {r["RANK"]: pid for pid, r in job.ranks().items() if r["SLURM_ARRAY_TASK_ID"] == "1"}
        nodes = {job.ranks()[pid]["SLURMD_NODENAME"] for pid in ranks.values()}
        assert (sorted(ranks), len(nodes)) == (["0", "1"], 2)
        os.kill(ranks["1"], signal.SIGKILL)
        job.goes_and_comes_back(1)
        assert "; requeued" in job.log(1), "the clock did that, and the death did not"
        assert job.log(1).count("; requeued") == 1
        cluster.run("scancel", job.array)
        job.ends()
