"""What takes longer on a real Ray cluster: places and zones, a killed driver, the Jobs API."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.launch.run.directory import read_json
from tests.support.launch.ray_cluster import SMALL, Cluster, Job
from tests.support.started_job import check, config_of_text, launcher, overrides
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_places(tmp_path: Path) -> None:
    with Cluster() as cluster:
        a, b = *cluster.add(2, zone="a"), *cluster.add(2, zone="b")
        zones: dict[str, Any] = {"ray.zones": ["a", "b"], "ray.zone_label": "zone"}
        with Job(cluster, tmp_path / "packed", 60, replicas=3, ranks_per_replica=2, **zones) as job:
            job.until(lambda: job.events("ReplicaUnplaced"), "the word on replica 2")
            job.until(lambda: job.contributing() == {0, 1}, "the first steps")
            assert (job.node_of(0), job.node_of(1)) == (a, b)
            groups = {g["name"]: g["nodes"] for g in cluster.ask()["groups"]}
            assert groups == {"ft_hsdp-job-0": [a], "ft_hsdp-job-1": [b], "ft_hsdp-job-2": [None]}
            summary = job.end()
        assert summary["unplaced"] == [2]
        assert "1 x (CPU 2)" in job.events("StartPrevented", replica=2)[0]["reason"]
        done = {n: r for n, r in summary["replicas"].items() if r["digest"]}
        assert set(done) == {"0", "1"}
        assert len({r["digest"] for r in done.values()}) == 1
        cluster.emptied()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_whatever_ends_it_nothing_is_left(tmp_path: Path) -> None:
    with Cluster() as cluster:
        cluster.add(1, 1)
        for name, number, code, replicas in (
            ("killed", signal.SIGKILL, -9, 2),
            ("interrupted", signal.SIGINT, 130, 2),
            ("without-a-place", signal.SIGTERM, 143, 3),
        ):
            with Job(cluster, tmp_path / name, 5000, replicas=replicas, spares=1) as job:
                job.until(lambda job=job: job.contributing() == {0, 1}, "steps")
                job.until(lambda: len(cluster.ask()["groups"]) == 3, "a replica or spare that looks for a place")
                if replicas == 3:
                    job.until(lambda job=job: job.events("ReplicaUnplaced"), "the word on replica 2")
                os.kill(job.process.pid, number)
                assert job.process.wait(60) == code, job.tail()
            cluster.emptied()
        assert [p.name for p in job.nodes.iterdir()] == [".cache"]  # what the killed one left is swept

        with Job(cluster, tmp_path / "crowd", 5000, replicas=2) as job:
            job.until(lambda: job.contributing() == {0, 1}, "steps")
            second = launcher("submit", *job.words, "--job.runs_dir=x", cwd=tmp_path, env=cluster.env)
            assert (second.returncode, len(second.stderr.splitlines())) == (64, 1), second.stderr
            assert "job.name: got 'job'" in second.stderr
            wrong = {**cluster.env, "RAY_AUTH_TOKEN": "0" * 64}
            done = launcher("status", "--ray-address", cluster.address, env=wrong)
            assert (done.returncode, len(done.stderr.splitlines())) == (69, 1), done.stderr
            assert "refuses this process" in done.stderr


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_jobs_api(tmp_path: Path) -> None:
    with Cluster(5) as cluster, ThreadPoolExecutor(3) as aside:
        url = f"http://{cluster.dashboard}"
        config = config_of_text(tmp_path)
        small = {**SMALL, "replicas": 2, "train.steps": 20, "ray.folder": str(cluster.folder / "of-ranks")}
        words = overrides(small)
        at = ["--ray-address", url, f"--job.runs_dir={tmp_path / 'runs'}"]
        fleet = ("--job.name=fleet", "--lighthouse.count=3", '--lighthouse.etcd=["http://127.0.0.1:1"]')
        refusal = aside.submit(launcher, "submit", config, *at, *words, *fleet, env=cluster.env, deadline_s=240)
        upload = aside.submit(uploaded, cluster, url, words, tmp_path / "upload")
        alone = ("--job.name=endless", "--train.steps=100000", "--replicas=1")
        peace = aside.submit(stopped_in_peace, cluster, [config, *at, *words, *alone], tmp_path)
        done = launcher("submit", config, *at, *words, "--json", env=cluster.env, deadline_s=240)
        assert done.returncode == 0, done.stderr
        check(json.loads(done.stdout), 20)
        assert "step 20/20" in done.stderr
        assert read_json(tmp_path / "runs" / "run" / "summary.json") == json.loads(done.stdout)
        refused = refusal.result()
        assert refused.returncode == 64
        assert "lighthouse.count: got 3" in refused.stdout
        done = upload.result()
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 replicas equal" in done.stdout
        assert cluster.token not in done.stdout + done.stderr
        peace.result()
        cluster.emptied()


def uploaded(cluster: Cluster, url: str, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Submit a folder as a user of Ray does; its driver starts a job of ours."""
    config_of_text(folder)
    submit = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", url]
    ours = ["python", "-m", "ft_hsdp.launch.cli", "submit", "config.yaml", *words, "--job.name=uploaded"]
    return subprocess.run(
        [*submit, "--working-dir", str(folder), "--", *ours],
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=240,
    )


def stopped_in_peace(cluster: Cluster, words: list[str], folder: Path) -> None:
    """Ctrl-C from outside: the driver there is not killed before it has ended its job."""
    run = folder / "runs" / "endless"
    with subprocess.Popen(
        [sys.executable, "launcher.py", "submit", *words],
        cwd=Path(__file__).parents[2],
        env=cluster.env,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as client:
        try:
            metrics = run / "metrics.jsonl"
            until(lambda: metrics.exists() and metrics.stat().st_size, "it trains", 180.0)
            driver = psutil.Process(read_json(run / "supervisor.json")["pid"])
            assert (
                int(driver.environ()["RAY_JOB_STOP_WAIT_TIME_S"]) > 3
            )  # its own, and that of Ray's that stops it
            client.send_signal(signal.SIGINT)
            assert client.wait(90) == 130
        finally:
            client.kill()
    assert read_json(run / "summary.json")["steps"] > 0
