"""A real job, started, asked for its status and ended: its tokens stand in their files and nowhere else."""

import ipaddress
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.scenarios.scenario_job import ROOT, Job
from tests.support.warm import COLD

DEADLINE_S = 90.0
NAMES = ("admin_token", "checkpoint_key", "token")


@pytest.fixture(autouse=True)
def _as_users_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COLD, "1")


def command_lines(job: Job) -> str:
    """What everybody on this machine may read of the job's processes."""
    lines = []
    for process in psutil.Process(job.process.pid).children(recursive=True):
        try:
            lines += [*process.cmdline(), process.name()]
        except psutil.Error:
            continue
    return "\n".join(lines)


@pytest.mark.proof
def test_the_tokens_stand_in_their_files_alone(tmp_path: Path) -> None:
    tokens = {}
    said = ""
    with Job(tmp_path, 20, replicas=2, ranks_per_replica=1) as job:
        deadline = time.monotonic() + DEADLINE_S
        while job.process.poll() is None:
            assert time.monotonic() < deadline
            said += command_lines(job)
            tokens |= {f: (job.run / f).read_text().strip() for f in NAMES if (job.run / f).exists()}
            if (job.run / "lighthouse.json").exists() and "replicas" not in said:
                command = [
                    sys.executable,
                    str(ROOT / "launcher.py"),
                    "status",
                    "--json",
                    "--runs-dir",
                    str(job.run.parent),
                ]
                found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
                said += found.stdout + found.stderr
            time.sleep(0.1)
        assert job.process.returncode == 0, job.log.read_text()
    assert "lighthouse" in said
    assert "replicas" in said
    assert sorted(tokens) == [*NAMES]
    files = [f for f in tmp_path.rglob("*") if f.is_file() and f.name not in tokens]
    assert len(files) > 10
    for name, token in tokens.items():
        assert len(token) == 64
        assert (job.run / name).stat().st_mode & 0o777 == 0o600
        assert token not in said
        for file in files:
            assert token.encode() not in file.read_bytes(), file


# A real job on one machine: where its processes listen, torch's own listeners included.


def listeners(pid: int) -> set[tuple[int, str]]:
    """Every (pid, address) at which a process and its descendants listen."""
    found = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            each = process.net_connections(kind="inet")
        except psutil.Error:
            continue
        found |= {(process.pid, c.laddr.ip) for c in each if c.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.proof
def test_a_job_on_loopback_listens_nowhere_else(tmp_path: Path) -> None:
    with Job(tmp_path, 200, replicas=2, ranks_per_replica=2) as job:
        job.until(lambda: job.step() >= 2, "two steps are committed")
        ranks = {job.pid(replica, rank) for replica in (0, 1) for rank in (0, 1)}
        found = listeners(job.process.pid)
        assert ranks <= {pid for pid, _ in found}
        assert [(pid, ip) for pid, ip in found if not ipaddress.ip_address(ip).is_loopback] == []
