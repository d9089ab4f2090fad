"""`render slurm`: the script submits, tells Slurm's signals apart, and queues again what that may help."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ft_hsdp import mounts
from ft_hsdp.config import Config, load, parse
from ft_hsdp.launch import cli
from ft_hsdp.launch.backend.processes import environment
from ft_hsdp.launch.render.settings import Site
from ft_hsdp.launch.render.slurm import slurm
from ft_hsdp.launch.run.directory import read_json, read_jsonl
from ft_hsdp.mounts import Ability, Mount
from tests.support.aborted import aborted
from tests.support.launch.slurm_cluster import SlurmCluster
from tests.support.os_faults import poor
from tests.support.refused import refused
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
BUDGET = 4
SBATCH = """#!/usr/bin/env bash
cat > "$0.stdin.$$"
echo "$*" >> "$0.log"
[ -s "$0.stdin.$$" ] && mv "$0.stdin.$$" "$0.script"
echo "$((10 + $(wc -l < "$0.log")));cluster"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >> "$0.log"
exit 1   # Slurm would end the script now
"""
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$0.log"
echo "${FT_HSDP_NODE-} ${FT_HSDP_HOST-}" >> "$0.host.log"
trap 'exit 143' TERM
[ "$FAKE_CODE" != wait ] || { touch "$0.runs"; sleep 60 & wait; }
exit "$FAKE_CODE"
"""


def _config(tmp_path: Path, *overrides: str) -> Config:
    runs = f"--job.runs_dir={tmp_path}/runs"
    return load(ROOT / "configs/quickstart.yaml", ["--chaos=[]", f"--restart.budget={BUDGET}", runs, *overrides])


class Fakes:
    """A rendered script, and stand-ins for Slurm's programs and for Python that log their arguments."""

    def __init__(self, folder: Path, *overrides: str, nodes: int | None = None) -> None:
        self.folder = folder
        for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("python", PYTHON)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "runs").mkdir()
        self.script = folder / "job.sh"
        self.script.write_text(
            slurm(_config(folder, *overrides), Site(python=str(folder / "python"), nodes=nodes))
        )

    def start(self, code: int | str, **env: str) -> subprocess.Popen[bytes]:
        path = f"{self.folder}:{os.environ['PATH']}"
        command = ["bash", str(self.script)]
        said = {"PATH": path, "FAKE_CODE": str(code), **env}
        return subprocess.Popen(command, env=said, stdout=subprocess.DEVNULL)

    def element(self, code: int | str, **env: str) -> subprocess.Popen[bytes]:
        given = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"}
        return self.start(code, **given, **env)

    def log(self, program: str) -> list[str]:
        file = self.folder / f"{program}.log"
        return file.read_text().splitlines() if file.exists() else []

    def until_it_runs(self) -> None:
        until((self.folder / "python.runs").exists, "it runs")


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


NETWORK = "--network.allow=[10.0.0.0/8]"
SITES = [
    (Site(), ()),
    (Site(nodes=2, gpus=1, memory_gib=8, partition="gpu,low", account="a", time="1-12:00:00"), (NETWORK,)),
    (Site(python="/opt/my env/it's/python"), ("--network.host=10.0.0.5", "--network.port=29500")),
]


@pytest.mark.parametrize(("site", "overrides"), SITES)
def test_shells_understand_the_script(tmp_path: Path, site: Site, overrides: tuple[str, ...]) -> None:
    script = tmp_path / "job.sh"
    script.write_text(slurm(_config(tmp_path / "it's a folder", *overrides), site))
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = shutil.which("shellcheck") if not shellcheck.exists() else str(shellcheck)
    assert found is not None, "shellcheck is missing: pip install -e '.[dev]'"
    subprocess.run([found, "--severity=style", script], check=True)


def test_the_array_asks_for_a_node_for_each_machine_and_spare_ones(tmp_path: Path) -> None:
    site = Site(nodes=2, cpus=4, gpus=1, memory_gib=8, partition="gpu", account="a", time="60")
    sizes = (
        "--ranks_per_replica=8",
        "--max_replicas=5",
        "--hosts.per_replica=2",
        "--hosts.spare=1",
        "--timeouts.stop_s=45.5",
        NETWORK,
    )
    text = slurm(_config(tmp_path, *sizes), site)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    assert asked == {
        "requeue": "",
        "job-name": "quickstart",
        "array": "0-10",
        "nodes": "1",
        "ntasks-per-node": "1",
        "cpus-per-task": "16",
        "gpus-per-node": "4",
        "mem": "8G",
        "partition": "gpu",
        "account": "a",
        "time": "60",
        "signal": "B:USR1@76",
        "open-mode": "append",
        "output": f'"{tmp_path}/runs/quickstart-slurm-%a.log"',
    }


def test_one_command_submits_lighthouse_array_and_end(fakes: Fakes) -> None:
    assert fakes.start(0).wait(20) == 0
    lighthouse, array, end, signals, _ = fakes.log("sbatch")
    assert "--export=ALL,FT_HSDP_PART=lighthouse" in lighthouse
    assert not re.search(r"^#SBATCH", (fakes.folder / "sbatch.script").read_text(), re.MULTILINE)
    assert shlex.split(array) == ["--parsable", "--dependency=after:11", str(fakes.script)]
    assert "--dependency=afterany:12" in end
    assert shlex.split(signals)[:4] == ["scancel", "--batch", "--signal=TERM", "11;"]
    assert "--wrap=while squeue" in end


def test_the_lighthouse_has_a_clock_of_its_own(tmp_path: Path) -> None:
    site = Site(time="60", partition="gpu")
    submits = slurm(_config(tmp_path), site).partition("# On a login node.")[2].partition("array=")[0]
    assert all(option in submits for option in ("--requeue", "--signal=B:USR1@60", "--partition=gpu", "--time=60"))


def test_an_element_is_the_replica_of_its_number(fakes: Fakes) -> None:
    assert fakes.element(0).wait(20) == 0
    settings = fakes.folder / "runs/quickstart-slurm-1.yaml"
    (ran,) = fakes.log("python")
    assert ran.split() == ["-m", "ft_hsdp.launch.cli", "replica", str(settings), "--replica", "1"]
    assert load(settings).job.runs_dir == str(fakes.folder / "runs")
    assert fakes.log("scontrol") == []


@pytest.mark.parametrize(
    ("sizes", "nodes", "hosts"), [((), 2, 2), (("--hosts.per_replica=1", "--hosts.spare=1"), None, 1)]
)
def test_an_element_is_a_machine_where_replicas_have_several_or_some_spare(tmp_path, sizes, nodes, hosts) -> None:
    fakes = Fakes(tmp_path, NETWORK, *sizes, nodes=nodes)
    assert fakes.element(0, SLURMD_NODENAME="node7").wait(20) == 0
    assert fakes.log("python.host") == ["node7 node7-1"]
    settings = tmp_path / "runs/quickstart-slurm-1.yaml"
    (ran,) = fakes.log("python")
    assert ran.split() == ["-m", "ft_hsdp.launch.cli", "host", str(settings)]
    said = load(settings).hosts
    assert (said.per_replica, said.spare) == (hosts, 0), "a machine that no replica needs is spare"


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(75, 0, True), (69, 0, True), (1, 0, True), (64, 0, False), (76, 0, False), (75, BUDGET, False)],
)
def test_only_what_may_help_is_queued_again_within_the_budget(fakes, code, restarts, again) -> None:
    assert fakes.element(code, SLURM_RESTART_COUNT=str(restarts)).wait(20) == (75 if again else code)
    assert fakes.log("scontrol") == (["requeue 9_1"] if again else [])


def test_nobody_comes_back_to_a_job_that_is_over(fakes: Fakes) -> None:
    final = fakes.folder / "runs/quickstart/replicas/0/final.json"
    final.parent.mkdir(parents=True)
    final.touch()
    assert fakes.element(75).wait(20) == 75
    assert fakes.log("scontrol") == []


@pytest.mark.parametrize(("number", "code", "again"), [(signal.SIGUSR1, 75, True), (signal.SIGTERM, 143, False)])
def test_its_clock_queues_an_element_again_and_a_stop_does_not(fakes, number, code, again) -> None:
    element = fakes.element("wait", SLURM_RESTART_COUNT=str(BUDGET))
    fakes.until_it_runs()
    element.send_signal(number)
    assert element.wait(20) == code
    assert fakes.log("scontrol") == (["requeue 9_1"] if again else [])


def test_a_lighthouse_starts_again_on_its_port_until_it_is_told_to_end(fakes: Fakes) -> None:
    (fakes.folder / "python").write_text(PYTHON.replace("exit 143", 'echo told >> "$0.log"; exit 0'))
    lighthouse = fakes.start("wait", SLURM_JOB_ID="12", FT_HSDP_PART="lighthouse")
    fakes.until_it_runs()
    lighthouse.terminate()
    assert lighthouse.wait(20) == 0
    started, told = fakes.log("python")
    assert "lighthouse" in started
    assert {f"--network.host={os.uname().nodename}", "--network.port=30012"} <= {*started.split()}
    assert told == "told"
    assert fakes.log("scontrol") == []
    assert fakes.start(64, SLURM_JOB_ID="12", FT_HSDP_PART="lighthouse").wait(20) == 64


def test_a_lighthouse_whose_time_is_up_is_queued_again(fakes: Fakes) -> None:
    lighthouse = fakes.start("wait", SLURM_JOB_ID="12", FT_HSDP_PART="lighthouse")
    fakes.until_it_runs()
    lighthouse.send_signal(signal.SIGUSR1)
    assert lighthouse.wait(20) == 75
    assert fakes.log("scontrol") == ["requeue 12"]


@pytest.mark.parametrize(
    ("site", "overrides", "key"),
    [
        (Site(partition="a b"), (), "--partition"),
        (Site(account="a\n#SBATCH --x"), (), "--account"),
        (Site(time="soon"), (), "--time"),
        (Site(nodes=2), (), "network.allow"),
        (Site(nodes=2), (NETWORK, "--hosts.per_replica=1"), "--nodes-per-replica"),
        (Site(), ('--job.runs_dir=a"b',), "job.runs_dir"),
        (Site(), ("--lighthouse.count=2", "--lighthouse.etcd=[http://a:2379]"), "lighthouse.count"),
    ],
)
def test_what_slurm_would_misread_is_one_line(tmp_path, site, overrides, key) -> None:
    refused(lambda: slurm(_config(tmp_path, *overrides), site), key=key)


def test_a_folder_in_which_no_lighthouse_would_start_is_refused_when_the_script_is_made(tmp_path: Path) -> None:
    etcd = "--lighthouse.etcd=[http://a:2379]"
    with mock.patch.object(mounts, "mount_of", return_value=Mount(tmp_path, "lustre", ())):
        line = refused(lambda: slurm(_config(tmp_path), Site()), f"lustre at {tmp_path}", "lighthouse.etcd")
        assert "[http://HOST:2379]" in line, "the value"
        assert "http://a:2379" in slurm(_config(tmp_path, etcd), Site())
        with poor(tmp_path, Ability.LOCKS):
            refused(lambda: slurm(_config(tmp_path, etcd), Site()), "lustre has no locks", "job.runs_dir")


def test_paths_mean_the_same_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept, evaluated = {"dir": "kept", "every": 5}, {"every": 5, "data": "other"}
    text = slurm(parse({"data": {"path": "text"}, "checkpoint": kept, "eval": evaluated}), Site())
    for path in ("runs_dir: {}/runs", "path: {}/text", "data: {}/other", "dir: {}/kept"):
        assert path.format(tmp_path) in text


def test_a_users_script_is_named_and_has_one_path_on_every_node(tmp_path, monkeypatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    text = slurm(parse({"entry": "train.py"}), Site())
    assert f"\nentry: {tmp_path}/train.py\n" in text
    assert "entry_digest" not in text, "the script may change until the job starts"
    refused(lambda: slurm(parse({"entry": "gone.py"}), Site()), "there is no such file in")


def test_the_command_takes_the_python_that_renders(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "slurm", str(ROOT / "configs/quickstart.yaml"), "--partition", "gpu"]) == 0
    assert f"python={shlex.quote(sys.executable)}\n" in capsys.readouterr().out


# What `render slurm` prints, on a real Slurm.


DEADLINE_S = 120.0
JOB = {
    "job": {"name": "tiny"},
    "replicas": 2,
    "ranks_per_replica": 1,
    "train": {"steps": 100_000, "micro_batch": 2, "seq_len": 32},
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
        self.array = cluster.run("bash", str(script)).partition("array ")[2].partition(";")[0]

    def rows(self, replica: int, name: str = "commits.jsonl") -> list[dict[str, Any]]:
        return read_jsonl(self.run / f"replicas/{replica}" / name)

    def events(self) -> list[dict[str, Any]]:
        return [row for replica in range(2) for row in self.rows(replica, "events.jsonl")]

    def log(self, replica: int) -> str:
        return (self._runs / f"tiny-slurm-{replica}.log").read_text()

    def ranks(self, replica: int) -> list[dict[str, Any]]:
        """Those of one of its hosts."""
        rows: list[dict[str, Any]] = read_json(self.run / f"replicas/{replica}/processes.json")["ranks"]
        return rows

    def element(self, replica: int) -> int:
        """The element that has rank 0 of a replica."""
        starts = read_jsonl(self.run / "lighthouse/events.jsonl")
        hosts = [row["hosts"] for row in starts if row["event"] == "ReplicaStarted" and row["replica"] == replica]
        return int(hosts[-1][0].rpartition("-")[2])

    def goes_and_comes_back(self, replica: int) -> None:
        """Wait until the other one has trained alone since now, and then both have."""
        other, seen = 1 - replica, len(self.rows(1 - replica))
        self.until(
            lambda: [other] in [r["contributors"] for r in self.rows(other)[seen:]], "the other goes on alone"
        )
        before = len(self.rows(replica))
        self.until(lambda: len(self.rows(replica)) > before + 10, "it is back")

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
def test_a_spare_element_takes_the_place_of_one_that_leaves_or_is_cancelled(tmp_path: Path) -> None:
    sizes = {
        "ranks_per_replica": 2,
        "hosts": {"per_replica": 1, "spare": 1},
        "network": {"allow": ["127.0.0.0/8"]},
    }
    with SlurmCluster(nodes=2) as cluster:
        job = Submitted(cluster, tmp_path, {**JOB, **sizes}, Site(python=sys.executable))
        job.until(lambda: len(job.rows(0)) >= 10 and len(job.rows(1)) >= 10, "both train")

        # Told by Slurm's clock, the ranks of an element leave after a step, and a spare one gets them.
        element = job.element(1)
        cluster.run("scancel", "--batch", "--signal=USR1", f"{job.array}_{element}")
        job.goes_and_comes_back(1)
        assert job.element(1) != element
        assert aborted(job.events()) == []
        job.until(lambda: "; requeued" in job.log(element), "it is requeued")
        job.until(lambda: job.log(element).count(" joined, ") == 2, "it is spare")

        # A rank dies: it starts again in its element, of which Slurm does not notice anything.
        element = job.element(1)
        os.kill(next(rank["pid"] for rank in job.ranks(1)), signal.SIGKILL)
        job.goes_and_comes_back(1)
        assert job.element(1) == element

        # An element that is lost, with all its processes.
        cluster.run("scancel", "--signal=KILL", "--full", f"{job.array}_{element}")
        job.goes_and_comes_back(1)
        assert job.element(1) != element
        cluster.run("scancel", job.array)
        job.ends()
