"""Replicas that are started by hand on machines which share a network and nothing else."""

import contextlib
import os
from pathlib import Path

import psutil
import pytest

from ft_hsdp import address
from tests.support.machines import Machine, Rig, needs_machines
from tests.support.machines_job import JobOnMachines
from tests.support.waiting import until

OWN = ("/dev/shm/mine", "/run/mine", "/tmp/mine")


@needs_machines
@pytest.mark.parametrize("v6", [False, True])
def test_a_machine_has_its_own_of_all_and_nothing_is_left_of_it(v6: bool, tmp_path: Path) -> None:
    outside = psutil.net_if_addrs().keys()
    with contextlib.suppress(ZeroDivisionError), Rig(tmp_path, 2, v6=v6, shared="shared") as rig:
        one, two = rig.machines
        assert one.run("hostname") == "machine0\n"
        assert one.run("getent", "hosts", "machine1").split() == [two.address, "machine1"]
        one.run("touch", *OWN, "/tmp/shared/ours")
        one.run("ipcmk", "-M", "64")
        assert two.run("find", "/dev/shm", "/run", "/tmp/shared", "-type", "f").split() == ["/tmp/shared/ours"]
        assert [path for path in (*OWN, two.tmp / "mine") if Path(path).exists()] == []
        assert ((one.tmp / "mine").exists(), (tmp_path / "shared/ours").exists()) == (True, True)
        assert [len(m.run("cat", "/proc/sysvipc/shm").splitlines()) for m in (one, two)] == [2, 1]  # with a title
        two.lose()
        two.boot()
        assert next(filter(str.isdecimal, two.run("ls", "/proc").split())) == "1"
        one.start("more", ["sleep", "600"])
        inside = until(lambda: found if len(found := list(rig.processes())) == 3 else [])
        raise ZeroDivisionError  # a test that fails
    assert not [process for process in inside if process.is_running()]
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"ft-hsdp-{os.getpid()}-")]
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert outside == psutil.net_if_addrs().keys()


LEASE_S = 2.0
LEASE = f"quorum: {{lease_s: {LEASE_S}}}"


class LoneReplica(JobOnMachines):
    """Replica 0 alone, under torchrun, with one rank on each of two machines: no supervisor of ours is there."""

    allow = ", allow: [10.77.0.0/16]"

    def begin(self, replica: int, machine: Machine, other: Machine | None = None) -> None:
        nodes, where = (machine, other or self.machines[2]), address.join(machine.address, 29400)
        self._at["replica0"], start = machine, f"start{len(self._at)}"
        shared = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-backend=c10d")
        for node in nodes:
            name, host = f"{start}-{node.name}", f"--rdzv-conf=is_host={node is machine}"
            self._at[name] = node
            common = (*shared, f"--rdzv-endpoint={where}", f"--rdzv-id={start}", host)
            torchrun = self._torchrun(name, *common, *self._replica(0), *self._lighthouse)
            self.supervisors.setdefault(0, torchrun)


@needs_machines
@pytest.mark.proof
def test_a_lone_replica_goes_on_after_the_loss_of_one_of_its_machines(tmp_path: Path) -> None:
    with Rig(tmp_path, 4) as rig, LoneReplica(rig, tmp_path, 1, 2, "memory: {copies: 2}") as job:
        torchrun = job.supervisors.pop(0)
        job.until(lambda: job.step(0) >= 4, "states whose copies are there")
        rig.machines[2].lose()
        job.until(lambda: torchrun.poll() is not None, "the ranks of the other machine end")
        job.begin(0, rig.machines[1], rig.machines[3])
        job.until(lambda: job.events(0, "StateRestored"), "the copies are found")
        job.end()
        (restored,) = job.events(0, "StateRestored")
    assert (restored["rung"], restored["lost_steps"] <= 1) == ("copy", True)


@needs_machines
@pytest.mark.proof
@pytest.mark.parametrize(("same", "v6"), [(False, True), (True, False)])
def test_a_machine_is_lost_and_its_replica_contributes_again(same: bool, v6: bool, tmp_path: Path) -> None:
    """On the same machine if its processes were killed, else on another one."""
    with Rig(tmp_path, 5, v6=v6) as rig, JobOnMachines(rig, tmp_path, 3, 1) as job:
        far = rig.machines[2]
        far.lose(cut=not same)
        job.until(lambda: job.contributors() == [0, 2], "the others go on")
        if same:
            far.boot()
        job.begin(1, far if same else rig.machines[4])
        job.until(lambda: job.contributors() == [0, 1, 2], "it contributes again")
        _, summary = job.end()
    assert [summary["replicas"][replica]["incarnations"] for replica in "012"] == [1, 2, 1]
    assert [(failure["replica"], failure["back"]) for failure in summary["failures"]] == [(1, True)]


@needs_machines
@pytest.mark.proof
def test_training_goes_on_while_the_lighthouses_machine_is_cut_off(tmp_path: Path) -> None:
    """The machines share the run's directory, and replicas know the lighthouse from there."""
    with Rig(tmp_path, 4, shared="runs") as rig, JobOnMachines(rig, tmp_path, 3, 1) as job:
        rig.machines[0].cut()
        job.steps(6, "steps without a lighthouse")
        rig.machines[0].heal()
        _, summary = job.end()
        assert len(job.told("EpochGranted")) == 1
    assert (summary["failures"], summary["recoveries"]) == ([], [])
    assert {row["epoch"] for replica in range(3) for row in job.rows(replica)} == {1}


@needs_machines
@pytest.mark.proof
def test_a_replica_that_does_not_reach_the_lighthouse_beyond_its_lease_is_not_lost(tmp_path: Path) -> None:
    """It stops in order, and comes back; it reaches the other replica all the time."""
    with Rig(tmp_path, 3) as rig, JobOnMachines(rig, tmp_path, 2, 1, f"{LEASE}\nrestart: {{budget: 1}}") as job:
        lighthouse, _, far = rig.machines
        far.cut(lighthouse)
        job.until(lambda: job.events(1, "LeaseEnded"), "the lease of replica 1 ends")
        job.until(lambda: job.contributors() == [0], "replica 0 goes on alone")
        job.steps(5, "it trains on, for long")
        far.heal(lighthouse)
        job.until(lambda: job.contributors() == [0, 1], "replica 1 contributes again")
        job.end()
        assert not job.events(0, "RankEnded"), "the healthy one was held to hang"
        assert not job.events(1, "RankEnded"), "the one that is cut off was held to hang"
        assert len(job.events(0, "CheckedIn")) == 1, "the healthy one was started again"
        assert [row["replica"] for row in job.told("ReplicaStarted")].count(1) == 2
        assert not job.told("ReplicaLost")
