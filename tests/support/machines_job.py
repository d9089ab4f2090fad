"""A job on machines that share a network and nothing else, or the run's directory."""

import json
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Self

import psutil

from ft_hsdp import address
from ft_hsdp.config import load
from ft_hsdp.launch.run.directory import Row, RunDir, read_json, read_jsonl
from ft_hsdp.launch.run.recorder import Recorder
from ft_hsdp.launch.run.verify import verify
from tests.support import warm
from tests.support.machines import TMP, Machine, Rig
from tests.support.slow_script import write_slow_script
from tests.support.started_job import check
from tests.support.torchrun_job import ROOT, TorchrunJob

STEPS, STEP_S = 40, 0.8  # they last until a machine is back, on a slow one, too; then they take no time
TOKEN, PORT = "the-token-of-a-job-on-machines", 29500
SETTINGS = """
entry: slow.py
timeouts: {evict_s: EVICT_S, connect_s: 2.0, reach_s: 20.0, place_s: 3.0}
ftar: {timeout_s: 3.0}
"""


class JobOnMachines(TorchrunJob):
    """Its lighthouse is on machine 0, and replica N on machine N + 1 until a test starts it elsewhere.

    In a rig that shares the folder `runs`, replicas find the lighthouse there.
    """

    step_count, step_s, evict_s = STEPS, STEP_S, 1.5
    allow = ""  # whose addresses are another machine's than the one that names them

    def __init__(self, rig: Rig, folder: Path, replicas: int, ranks: int, more: str = "") -> None:
        every = "::" if ":" in rig.host() else "0.0.0.0"
        network = f"network: {{host: '{every}', port: {PORT}{self.allow}}}"
        size = f"replicas: {replicas}\nranks_per_replica: {ranks}\ntrain: {{steps: {self.step_count}}}"
        settings = SETTINGS.replace("EVICT_S", str(self.evict_s))
        super().__init__(folder, f"{size}{settings}{network}\n{more}")
        self._shared, self.machines = rig.shared == "runs", rig.machines
        self.run = self.kept(rig.machines[0])
        self.supervisors: dict[int, warm.Process] = {}
        self._at = {"lighthouse": rig.machines[0]}
        for machine in rig.machines:
            shutil.copy(self._config, machine.tmp)
            write_slow_script(machine.tmp / "slow.py", TMP / "hurry", self.step_s)
        self._config = TMP / self._config.name
        self._replicas = replicas

    def __enter__(self) -> Self:
        super().__enter__()
        for replica in range(self._replicas):
            self.begin(replica, self.machines[replica + 1])
        self.until(lambda: all(self.contributors(r) == [*self.supervisors] for r in self.supervisors), "all train")
        return self

    def begin(self, replica: int, machine: Machine) -> None:
        """Start a replica on a machine."""
        self._at[f"replica{replica}"] = machine
        self.supervisors[replica] = self.replica(replica, *self._lighthouse)

    @property
    def _lighthouse(self) -> tuple[str, ...]:
        """The arguments by which a replica finds it."""
        url = f"http://{address.join(self.machines[0].address, PORT)}"
        return () if self._shared else ("--lighthouse", url)

    def _start(self, name: str, arguments: list[str], **variables: str) -> warm.Process:
        return self._at[name].start(name, self._command(name, arguments), FT_HSDP_TOKEN=TOKEN, **variables)

    def kept(self, machine: Machine) -> Path:
        """The run's directory on a machine."""
        return (self.folder if self._shared else machine.tmp) / "runs" / "job"

    def folder_of(self, replica: int) -> Path:
        return self.kept(self._at[f"replica{replica}"]) / "replicas" / str(replica)

    def contributors(self, replica: int = 0) -> list[int]:
        """Who contributed to the newest step of a replica."""
        rows = self.rows(replica)
        return rows[-1]["contributors"] if rows else []

    def steps(self, count: int, what: str) -> None:
        before = self.step(0)
        self.until(lambda: self.step(0) >= before + count, what)

    def end(self) -> tuple[RunDir, dict[str, Any]]:
        """Let it end soon; all that the machines have kept, as one run, which is allowed, and its summary."""
        for machine in self.machines:
            (machine.tmp / "hurry").touch()
        for process in self.supervisors.values():
            self.until(lambda process=process: process.poll() is not None, "the job ends")
            assert process.returncode == 0, self.tails()
        if self._shared:
            run = RunDir(self.run)
            self.until(run.summary.exists, "the summary")
        else:
            run = self._collected()
        assert verify(run).breaches == []
        summary: dict[str, Any] = read_json(run.summary)
        check(summary, self.step_count)
        return run, summary

    def _collected(self) -> RunDir:
        run, logs = RunDir(self.folder / "collected" / "job"), defaultdict[Path, list[bytes]](list)
        for kept in map(self.kept, self.machines):
            for file in filter(Path.is_file, kept.rglob("*")):
                to = run.path / file.relative_to(kept)
                to.parent.mkdir(parents=True, exist_ok=True)
                if file.suffix == ".jsonl":  # a replica that ran on two machines has one on both
                    logs[to] += file.read_bytes().splitlines(keepends=True)
                elif not to.exists() or "replicas" in file.parts:
                    shutil.copy(file, to)
        for to, lines in logs.items():
            whole = [bytes(line) for line in lines if line.endswith(b"}\n")]  # a lost machine may cut off its last
            whole.sort(key=lambda line: float(json.loads(line).get("t", 0.0)))
            to.write_bytes(b"".join(whole))
        recorder = Recorder(run, load(run.config), lambda _: None, lambda _: None, merge_events=False)
        while recorder.poll():
            pass
        recorder.finish()
        recorder.close()
        return run


FROM_MEMORY = {"agent", "copy", "replica"}


class JobOnHosts(JobOnMachines):
    """The lighthouse is on machine 0, each other one has an agent; a replica has a rank on each of its hosts."""

    allow = ", allow: [10.77.0.0/16]"

    def __init__(self, rig: Rig, folder: Path, replicas: int, hosts: int, more: str = "") -> None:
        super().__init__(rig, folder, replicas, hosts, f"hosts: {{per_replica: {hosts}}}\n{more}")

    def __enter__(self) -> Self:
        TorchrunJob.__enter__(self)
        for machine in self.machines[1:]:
            self.join(machine)
        everyone = list(range(self._replicas))
        self.until(lambda: all(self.contributors(r) == everyone for r in everyone), "all train")
        self.steps(4, "states whose copies are there")
        return self

    def options(self, machine: Machine) -> list[str]:
        """More arguments of the agent of a machine."""
        return []

    def join(self, machine: Machine) -> None:
        """Start the agent of a machine."""
        self._at[name := f"host{machine.number}"] = machine
        command = [str(ROOT / "launcher.py"), "host", str(self._config), *self._lighthouse, *self.options(machine)]
        self.supervisors[machine.number] = self._start(name, command)

    def agent(self, machine: Machine) -> psutil.Process:
        """The agent of a machine, which its holder has started."""
        below = psutil.Process(self.supervisors[machine.number].pid).children(recursive=True)
        (found,) = [each for each in below if "--holder" in each.cmdline()]
        return found

    def lose(self, machine: Machine, *, cut: bool) -> None:
        machine.lose(cut=cut)
        del self.supervisors[machine.number]

    def rows(self, replica: int, file: str = "commits.jsonl") -> list[Row]:
        """The lines of all machines on which the replica ran."""
        logs = [self.kept(machine) / "replicas" / str(replica) / file for machine in self.machines]
        return sorted((row for log in logs for row in read_jsonl(log)), key=lambda row: row["t"])

    def starts(self, replica: int) -> list[Row]:
        """Each incarnation of a replica, with its hosts."""
        return [row for row in self.told("ReplicaStarted") if row["replica"] == replica]

    def launcher(self, command: str, *more: str) -> str:
        return self.machines[0].run(sys.executable, str(ROOT / "launcher.py"), command, self.run.name, *more)

    def states(self) -> dict[Machine, str]:
        rows = {row["host"]: row["state"] for row in json.loads(self.launcher("status", "--json"))["hosts"]}
        return {machine: rows[machine.name] for machine in self.machines if machine.name in rows}

    def hosts(self, replica: int) -> list[Machine]:
        """Where its newest incarnation is."""
        names = self.starts(replica)[-1]["hosts"]
        return [machine for name in names for machine in self.machines if machine.name == name]

    def spare(self) -> Machine:
        used = [host.number for replica in range(self._replicas) for host in self.hosts(replica)]
        (spare,) = [machine for machine in self.machines[1:] if machine.number not in used]
        return spare

    def back(self, replica: int, starts: int) -> None:
        """Wait until an incarnation contributes, the STARTS-th of a replica."""

        def contributes() -> bool:
            names = [row["incarnation"] for row in self.starts(replica)]
            row = self.rows(replica)[-1]
            return names.index(row["incarnation"]) == starts - 1 and replica in row["contributors"]

        self.until(contributes, f"replica {replica} contributes again")

    def ended(self) -> list[dict[str, Any]]:
        """Let it end; its recoveries: from memory, at the cost of a step at most. The machines keep nothing."""
        _, summary = self.end()
        for number in self.supervisors:
            left = self.machines[number].run("ls", "/dev/shm")
            assert left == "", f"machine {number}: {left}"
        assert {each["rung"] for each in summary["recoveries"]} <= FROM_MEMORY
        assert all(each["lost_steps"] <= 1 for each in summary["recoveries"])
        recoveries: list[dict[str, Any]] = summary["recoveries"]
        return recoveries
