"""Hosts whose agents run what the lighthouse places on them: machines that share a network and nothing else."""

import contextlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ft_hsdp.errors import EXIT_HARDWARE
from ft_hsdp.launch.run.directory import read_json
from ft_hsdp.secret import worker_token
from ft_hsdp.state.transfer.donor_connection import ask_held
from lighthouse.http.access import view_key
from lighthouse.overview.machines import CLOCK, MEASURES, OFF_S
from tests.support.machines import Machine, Rig, needs_machines
from tests.support.machines_job import PORT, ROOT, STEPS, TOKEN, JobOnHosts
from tests.support.scenarios.scenario_job import agents_of
from tests.support.waiting import until

pytestmark = [needs_machines, pytest.mark.multiproc]
PROOF = pytest.mark.proof


@pytest.mark.parametrize(
    ("how", "hosts"),
    [("killed", 1), pytest.param("cut", 2, marks=PROOF), pytest.param("without its holder", 2, marks=PROOF)],
)
def test_a_spare_machine_takes_the_place_of_a_lost_one(how: str, hosts: int, tmp_path: Path) -> None:
    with Rig(tmp_path, 2 + 2 * hosts) as rig, JobOnHosts(rig, tmp_path, 2, hosts) as job:
        spare, (*stay, lost), other = job.spare(), job.hosts(1), job.hosts(0)
        if how == "without its holder":
            job.supervisors.pop(lost.number).kill()
        else:
            job.lose(lost, cut=how == "cut")
        job.back(1, 2)
        assert (job.hosts(1), job.hosts(0)) == ([*stay, spare], other)
        job.ended()
        assert how != "without its holder" or lost.run("ls", "/dev/shm") == ""
        assert all(0 in row["contributors"] for row in job.rows(0))
        assert len({row["incarnation"] for row in job.rows(0)}) == 1


class Patient(JobOnHosts):
    """An agent has the time to start again before its host counts as lost."""

    evict_s = 12.0


@PROOF
def test_ranks_go_on_when_their_agents_are_killed(tmp_path: Path) -> None:
    """One of them dies with the rank of another machine: the next agent tells of it."""
    with Rig(tmp_path, 3) as rig, Patient(rig, tmp_path, 2, 1) as job:
        for machine in rig.machines[1:]:
            old = job.agent(machine)
            old.kill()
            job.until(lambda old=old: not old.is_running(), "it is gone")
        job.steps(4, "both train on")
        assert [len(job.starts(replica)) for replica in (0, 1)] == [1, 1]
        (far,) = job.hosts(1)
        (rank,) = read_json(job.kept(far) / "replicas/1/processes.json")["ranks"]
        job.agent(far).kill()
        far.run("kill", "-9", str(rank["pid"]))
        job.back(1, 2)
        assert next(e["codes"] for e in job.told("ReplicaExited") if e["replica"] == 1) == {"0": -9}
        job.ended()


@PROOF
def test_each_rank_and_each_machine_tells_what_it_uses(tmp_path: Path) -> None:
    with Rig(tmp_path, 3) as rig, JobOnHosts(rig, tmp_path, 2, 1) as job:
        asked = f"http://127.0.0.1:{PORT}/metrics", {"Authorization": f"Bearer {view_key(TOKEN)}"}

        def values() -> dict[tuple[str, str], float]:
            """By name and host."""
            get = partial(httpx.get, asked[0], headers=asked[1], trust_env=False)
            families = text_string_to_metric_families(rig.machines[0].within(get).raise_for_status().text)
            samples = [each for family in families for each in family.samples]
            return {(each.name, each.labels["host"]): each.value for each in samples if "host" in each.labels}

        names = [name for name in (*MEASURES, CLOCK) if not re.match("gpu|host_checkpoint", name)]
        wanted = {(f"ft_hsdp_{name}", job.hosts(r)[0].name) for r in (0, 1) for name in names}
        job.until(lambda: values().keys() >= wanted, "all is told of both")
        for replica in (0, 1):
            (host,), found = job.hosts(replica), values()
            (rank,) = read_json(job.kept(host) / f"replicas/{replica}/processes.json")["ranks"]
            resident = int(host.run("cat", f"/proc/{rank['pid']}/statm").split()[1]) * os.sysconf("SC_PAGESIZE")
            assert found["ft_hsdp_rank_resident_bytes", host.name] == pytest.approx(resident, rel=0.5)
            assert abs(found[f"ft_hsdp_{CLOCK}", host.name]) < OFF_S
        job.ended()


class Checked(JobOnHosts):
    """Its third machine flips a bit."""

    def options(self, machine: Machine) -> list[str]:
        flip = "--debug.failpoints={check-flip: {replicas: [0], step: 0}}"
        return ["--hosts.check=0.01", *[flip] * (machine.number == 3)]


@PROOF
def test_the_job_goes_on_without_a_machine_that_fails_its_check(tmp_path: Path) -> None:
    with Rig(tmp_path, 4) as rig, Checked(rig, tmp_path, 2, 1) as job:
        unfit, refused = rig.machines[3], job.supervisors.pop(3)
        job.until(lambda: refused.poll() is not None, "it ends")
        assert refused.returncode == EXIT_HARDWARE
        why = "hosts.check: products of cpu: 1 of"
        assert why in (unfit.tmp / "host3.log").read_text().splitlines()[-1]
        (told,) = job.told("AskRefused")
        assert (told["host"], told["reason"][: len(why)]) == (unfit.name, why)
        assert unfit not in job.states()
        log = rig.machines[1].tmp / "host1.log"
        job.agent(rig.machines[1]).kill()
        job.until(lambda: " goes on" in log.read_text(), "another agent has its ranks")
        assert log.read_text().count("hosts.check") == 1
        job.ended()


@PROOF
def test_a_machine_that_was_cut_off_is_a_spare_one_when_it_is_back(tmp_path: Path) -> None:
    with Rig(tmp_path, 4) as rig, JobOnHosts(rig, tmp_path, 2, 1) as job:
        spare, (far,) = job.spare(), job.hosts(1)
        far.cut()
        job.back(1, 2)
        assert job.hosts(1) == [spare]
        (old,) = read_json(job.kept(far) / "replicas/1/processes.json")["ranks"]
        assert str(old["pid"]) in far.run("ls", "/proc").split(), "its rank runs still"
        far.heal()
        job.until(lambda: str(old["pid"]) not in far.run("ls", "/proc").split(), "it is ended")
        job.lose(spare, cut=False)
        job.back(1, 3)
        assert job.hosts(1) == [far]
        job.ended()


@PROOF
def test_a_machine_and_the_lighthouse_are_lost_at_once(tmp_path: Path) -> None:
    with Rig(tmp_path, 4) as rig, JobOnHosts(rig, tmp_path, 1, 2) as job:
        spare, (stays, lost) = job.spare(), job.hosts(0)
        job.lighthouse.kill()
        job.lose(lost, cut=True)
        job.lighthouse.wait()
        job.lighthouse_again(PORT)
        job.back(0, 2)
        assert job.hosts(0) == [stays, spare]
        job.ended()


@PROOF
def test_a_drained_machine_repeats_no_step_and_gets_no_ranks_until_it_is_undrained(tmp_path: Path) -> None:
    with Rig(tmp_path, 4) as rig, JobOnHosts(rig, tmp_path, 1, 2) as job:
        spare, (stays, away) = job.spare(), job.hosts(0)
        job.launcher("drain", "--host", away.name)
        job.back(0, 2)
        assert job.hosts(0) == [stays, spare]
        with pytest.raises(subprocess.CalledProcessError):
            job.launcher("drain", "--host", stays.name)  # there is no spare machine
        before = read_json(job.run / "lighthouse.json")
        job.lighthouse.kill()
        job.lighthouse.wait()
        job.lighthouse_again(PORT)
        job.until(lambda: read_json(job.run / "lighthouse.json") != before, "the lighthouse listens again")
        job.until(lambda: job.states() == {away: "cordoned", stays: "used", spare: "used"}, "all is remembered")
        job.launcher("undrain", "--host", away.name)
        job.launcher("drain", "--host", stays.name)
        job.back(0, 3)
        assert job.hosts(0) == [away, spare]
        assert [each["lost_steps"] for each in job.ended()] == [0, 0]
        assert [row["step"] for row in job.rows(0)] == [*range(1, STEPS + 1)]


class Long(JobOnHosts):
    step_count = 120


@PROOF
def test_machines_that_were_cut_off_come_back_with_old_copies(tmp_path: Path) -> None:
    """M60: the others go on, and copy among themselves. What they kept has another name, and nobody takes it."""
    with Rig(tmp_path, 5) as rig, Long(rig, tmp_path, 2, 2) as job:
        far = job.hosts(1)
        for machine in far:
            machine.cut()
        job.until(lambda: job.contributors() == [0], "the other one goes on")
        job.until(lambda: job.rows(0)[-1].get("copied_bytes"), "it copies among its own hosts")
        # A cut that is shorter than the lighthouse's patience costs the incarnation nothing.
        job.until(lambda: any(e["replica"] == 1 for e in job.told("ReplicaExited")), "it counts as lost")
        old = job.rows(1)[-1]
        for machine in far:
            (agent,) = agents_of(job.kept(machine), 1).values()
            held = machine.within(lambda agent=agent: ask_held({agent["address"]}, worker_token(TOKEN), 5.0))
            assert {row.host for rows in held.values() for row in rows} == {machine.name}
            kept = max(row.state.step for rows in held.values() for row in rows)
            assert old["step"] - 1 <= kept <= old["step"] < job.step(0)  # one may not have heard of the commit
        for machine in far:
            machine.heal()
        job.back(1, 2)
        _, summary = job.end()
    later = [row for row in job.rows(1) if row["step"] > old["step"]]
    assert all(row["lost_steps"] == 0 for row in summary["recoveries"])
    assert old["incarnation"] not in {row["incarnation"] for row in later}, "the old ranks trained on"
    assert (later[0]["role"], later[0]["step"] > old["step"] + 1) == ("behind", True), "it fetched a newer state"


@PROOF
@pytest.mark.timeout(600)
def test_the_words_of_the_page_run_a_job_and_lose_a_machine(tmp_path: Path) -> None:
    """`kill -9 %4` ends the holder of host c, which may be the spare one."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "hosts.md").read_text(), re.DOTALL)
    (words,) = [block for block in blocks if "for name in" in block]
    with Rig(tmp_path, 1) as rig:
        (machine,) = rig.machines
        for name in ("launcher.py", "configs"):
            (machine.tmp / name).symlink_to(ROOT / name)
        os.mkfifo(machine.tmp / "go")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        machine.start("shell", ["bash", "-c", f"{words}\nread -r < go; kill -9 %4; wait"], PATH=path)

        def seen() -> dict[str, Any]:
            found: dict[str, Any] = {"replicas": [], "hosts": [], "step": 0}
            with contextlib.suppress(subprocess.CalledProcessError):
                found |= json.loads(machine.run(sys.executable, "launcher.py", "status", "--json"))
            return found

        def trains(status: dict[str, Any], hosts: set[str]) -> bool:
            used = {host["host"] for host in status["hosts"] if host["state"] == "used"}
            states = [each.get("state") for each in status["replicas"]]
            return states == ["training"] * 2 and len(used) == 4 and used <= hosts

        until(lambda: trains(seen(), set("abcde")), "both replicas train", 240.0)
        before = seen()["step"]
        (machine.tmp / "go").write_text("\n")
        until(lambda: trains(now := seen(), set("abde")) and now["step"] > before, "they do again", 240.0)
