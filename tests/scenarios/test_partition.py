"""A host that a real network cuts off, with its state agents, and that comes back with what they kept.

The lighthouse and each replica are in a network namespace of their own, on a switch.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import namespaces
from benchmarks.namespaces import BRIDGE, SUBNET, Network
from ft_hsdp.launch.run.directory import RunDir, read_jsonl
from ft_hsdp.launch.run.replay import replay
from ft_hsdp.launch.run.verify import verify
from tests.support.scenarios.scenario_job import agents_of, check
from tests.support.slow_script import write_slow_script
from tests.support.torchrun_job import TorchrunJob

STEPS = 28  # at STEP_S they last until the host is back, on a slow machine, too; then they take no time
STEP_S = 0.8
LEASE_S = 2.0
SETTINGS = f"""
replicas: 2
ranks_per_replica: 2
hosts: {{per_replica: 2}}
entry: FOLDER/slow.py
train: {{steps: {STEPS}}}
network: {{host: HUB, allow: ["{SUBNET}"]}}
quorum: {{lease_s: {LEASE_S}}}
timeouts: {{evict_s: 1.5, connect_s: 2.0, reach_s: 2.0}}
ftar: {{timeout_s: 3.0}}
"""
HELD = """
import json, sys
from ft_hsdp.state.transfer.donor_connection import ask_held
answers = ask_held(set(sys.argv[2:]), open(sys.argv[1]).read().strip(), 5.0)
print(json.dumps(sorted({(row.host, row.state.step) for rows in answers.values() for row in rows})))
"""


class Apart(TorchrunJob):
    """A job whose replicas reach each other, and the lighthouse, over a switch alone."""

    def __init__(self, folder: Path, net: Network) -> None:
        super().__init__(folder, SETTINGS.replace("HUB", net.host()).replace("FOLDER", str(folder)))
        self._net = net

    def _command(self, name: str, arguments: list[str]) -> list[str]:
        number = name.removeprefix("replica")
        return self._net.inside(int(number) if number.isdecimal() else None, *super()._command(name, arguments))

    def plug(self, replica: int, *to: str) -> None:
        """Connect the link of a replica `to` the switch, or to nothing."""
        command = ["ip", "-n", self._net.hub, "link", "set", f"port{replica}", *(to or ["nomaster"])]
        subprocess.run(command, check=True, timeout=30)

    def held(self, replica: int) -> list[tuple[str, int]]:
        """Host and step of each shard that is in the memory of a replica's hosts, asked from there."""
        addresses = [agent["address"] for agent in agents_of(self.run, replica).values()]
        command = [sys.executable, "-c", HELD, str(self.run / "token"), *addresses]
        within = self._net.inside(replica, *command)
        answer = subprocess.check_output(within, timeout=60, cwd=Path(__file__).parents[2])
        return [(host, step) for host, step in json.loads(answer)]

    def events(self, replica: int, name: str) -> list[dict[str, Any]]:
        """The events of one name of a replica's ranks and supervisor."""
        rows = [*self.rows(replica, "events.jsonl"), *self.rows(replica, "supervisor.jsonl")]
        return [row for row in rows if row["event"] == name]

    def told(self, name: str) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.run / "lighthouse" / "events.jsonl") if row["event"] == name]

    def contributors(self) -> list[int]:
        """Who contributed to the newest step of replica 0."""
        rows = self.rows(0)
        return rows[-1]["contributors"] if rows else []


@pytest.mark.proof
@pytest.mark.skipif(bool(namespaces.unfit()), reason=f"a partition: {namespaces.unfit()}")
def test_a_host_that_is_cut_off_beyond_its_lease_comes_back_with_old_copies(tmp_path: Path) -> None:
    """M60: the others go on, and copy among themselves. What it has kept has another name, and nobody takes it."""
    write_slow_script(tmp_path / "slow.py", tmp_path / "hurry", STEP_S)
    with Network(2, "10gbit") as net, Apart(tmp_path, net) as job:
        supervisors = [job.replica(r, f"--network.host={net.host(r)}") for r in (0, 1)]
        job.until(lambda: job.contributors() == [0, 1] and job.step(1) >= 2, "both train")
        job.plug(1)
        job.until(lambda: job.contributors() == [0], "the other one goes on")
        job.until(lambda: job.rows(0)[-1].get("copied_bytes"), "it copies among its own hosts")
        old = job.rows(1)[-1]
        job.until(lambda: job.rows(0)[-1]["t"] > old["t"] + LEASE_S, "steps beyond the lease")
        job.until(lambda: job.told("ReplicaEvicted"), "the lighthouse gives the lost one up")
        kept = job.held(1)
        assert {host for host, _ in kept} == {"r1h0", "r1h1"}
        assert max(step for _, step in kept) == old["step"] < job.step(0)
        job.plug(1, "master", BRIDGE)
        job.until(lambda: job.contributors() == [0, 1], "it contributes again")
        (tmp_path / "hurry").touch()
        job.finals(supervisors)
        job.until((job.run / "summary.json").exists, "the summary")
    summary = json.loads((job.run / "summary.json").read_text())
    check(summary, STEPS)
    (recovery,) = summary["recoveries"]
    later = [row for row in job.rows(1) if row["step"] > old["step"]]
    assert (recovery["replica"], recovery["lost_steps"]) == (1, 0)
    # Ranks that restart after the link is back already find newer copies at the other replica's hosts.
    assert old["step"] <= recovery["state"][1] < later[0]["step"]
    assert job.told("ReplicaEvicted")[0]["incarnation"] == old["incarnation"]
    assert old["incarnation"] not in {row["incarnation"] for row in later}, "the old ranks trained on"
    assert (later[0]["role"], later[0]["step"] > old["step"] + 1) == ("behind", True), "it fetched a newer state"
    assert verify(RunDir(job.run)).breaches == []
    assert replay(RunDir(job.run)).equal
