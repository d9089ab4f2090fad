"""Whatever hosts lose, two at a time: no step is trained twice or left out, and all train again."""

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.launch.run.directory import read_json
from tests.support.machines import TMP, Machine, Rig, needs_machines
from tests.support.machines_job import PORT, ROOT, JobOnHosts
from tests.support.waiting import until

pytestmark = [needs_machines, pytest.mark.soak, pytest.mark.timeout(7200)]

LOSSES = 200
LONGEST_S = 6.0  # until what is lost comes back
MORE = "memory: {copies: 3}\nrestart: {budget: 100000}"  # two copies of a shard may be lost at once


class Losses(JobOnHosts):
    """A job whose machines lose what chance says."""

    step_s = 0.5

    def __init__(self, rig: Rig, folder: Path, replicas: int, hosts: int, seed: int, count: int) -> None:
        self.step_count = 14 * count + 100  # more than it trains meanwhile
        super().__init__(rig, folder, replicas, hosts, MORE)
        self.chance, self.rig = random.Random(seed), rig

    def newest(self, replica: int) -> dict[str, Any]:
        """The newest step of a replica, from the ends of its logs."""
        found: list[dict[str, Any]] = [{"t": 0.0, "step": 0, "contributors": []}]
        for machine in self.machines:
            path = self.kept(machine) / "replicas" / str(replica) / "commits.jsonl"
            with contextlib.suppress(OSError), path.open("rb") as log:
                log.seek(max(0, log.seek(0, 2) - 8192))
                lines = [line for line in log.read().splitlines(keepends=True)[1:] if line.endswith(b"}\n")]
                found += map(json.loads, lines[-1:])
        return max(found, key=lambda row: row["t"])

    def lose_of(self, machine: Machine) -> Callable[[], object]:
        """Lose something of a machine; what brings it back."""
        first, ways = (
            self.machines[0],
            ["cut", "one way", "killed", "cut and killed", "holder", "agent", "stopped", "rank"],
        )
        what = self.chance.choice(["cut", "killed"] if machine is first else ways)
        process = self.lighthouse if machine is first else self.supervisors[machine.number]
        print(f"step {self.newest(0)['step']}: {machine.name} {what}")
        if what == "cut":
            machine.cut()
            return machine.heal
        if what == "one way":
            machine.cut(first)
            return lambda: machine.heal(first)
        if what in ("stopped", "agent"):
            with contextlib.suppress(psutil.Error, ValueError):  # it is being started again
                agent = self.agent(machine)
                if what == "agent":
                    agent.kill()
                else:
                    agent.suspend()
                    return lambda: agent.is_running() and agent.resume()
            return lambda: None
        if what == "rank":
            for replica in range(self._replicas):
                if machine in self.hosts(replica):
                    found = read_json(self.kept(machine) / "replicas" / str(replica) / "processes.json")["ranks"]
                    pids = [str(rank["pid"]) for rank in found if rank["state"] == "running"]
                    with contextlib.suppress(
                        subprocess.CalledProcessError
                    ):  # it has ended because of another loss
                        machine.run("kill", "-9", *pids)
            return lambda: None
        if machine is first or what == "holder":
            process.kill()
            process.wait()
            return lambda: self.lighthouse_again(PORT) if machine is first else self.join(machine)
        self.lose(machine, cut=what != "killed")
        return lambda: self.again(machine)

    def again(self, machine: Machine) -> None:
        machine.boot()
        self.join(machine)

    def lose_some(self, machines: list[Machine]) -> None:
        """Lose something of these machines, and bring it back after a while; all contribute again."""
        for back in [self.lose_of(machine) for machine in machines]:
            time.sleep(self.chance.uniform(0.0, LONGEST_S))  # the fault itself lasts so long
            back()
        everyone = [*range(self._replicas)]
        enough = 3 + max(self.newest(replica)["step"] for replica in everyone)
        for replica in everyone:
            self.until(lambda r=replica: self.newest(r)["contributors"] == everyone, "it contributes again")
            self.until(lambda r=replica: self.newest(r)["step"] >= enough, "states whose copies are there")
        self.until(self.complete, "all machines have ranks, or are spare")

    def complete(self) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):
            found = self.states()
            return all(found.get(machine) in ("used", "spare") for machine in self.machines[1:])
        return False

    def running(self) -> set[int]:
        return {each.pid for each in self.rig.processes() if each.status() != psutil.STATUS_ZOMBIE}

    def ends_well(self) -> None:
        for machine in self.machines:
            (machine.tmp / "hurry").touch()
        until(lambda: self.newest(0)["step"] == self.step_count, "the last step", 1200.0, self.tails)
        self.ended()
        self.lighthouse.send_signal(signal.SIGTERM)
        until(
            lambda: self.running() == {machine.init for machine in self.machines}, "nothing else is left running"
        )
        shutil.copytree(self.folder / "collected", self.machines[0].tmp / "collected")
        words = ["replay", "job", "--json", "--runs-dir", str(TMP / "collected")]
        self.machines[0].start("replay", [sys.executable, str(ROOT / "launcher.py"), *words]).wait(1200)
        text = (self.machines[0].tmp / "replay.log").read_text()
        assert json.loads(text[text.index("{") :])["equal"], text


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_each_of_many_random_losses_all_replicas_contribute_again(seed: int, tmp_path: Path) -> None:
    with Rig(tmp_path, 6) as rig, Losses(rig, tmp_path, 2, 2, seed, LOSSES) as job:
        for _ in range(LOSSES):
            job.lose_some(job.chance.sample(rig.machines, job.chance.choice([1, 1, 1, 2])))
        job.ends_well()


def test_a_lone_replica_loses_machine_after_machine(tmp_path: Path) -> None:
    with Rig(tmp_path, 5) as rig, Losses(rig, tmp_path, 1, 3, 1, LOSSES // 10) as job:
        for number in range(LOSSES // 10):
            lost, starts = job.chance.choice(job.hosts(0)), len(job.starts(0))
            job.lose(lost, cut=bool(number % 2))
            job.back(0, starts + 1)
            job.again(lost)
            job.steps(3, "states whose copies are there")
            job.until(job.complete, "it is a spare machine")
        job.ends_well()
