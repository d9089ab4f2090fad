"""A real job, started, asked for its status and ended: its tokens stand in their files and nowhere else."""

import contextlib
import ipaddress
from pathlib import Path

import psutil
import pytest

from ft_hsdp.secret import worker_token
from tests.support.os_faults import listeners
from tests.support.running import running
from tests.support.scenarios.scenario_job import Job
from tests.support.started_job import launcher
from tests.support.waiting import until
from tests.support.warm import COLD

DEADLINE_S = 90.0
NAMES = ("admin_token", "checkpoint_key", "token")


@pytest.fixture(autouse=True)
def _as_users_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COLD, "1")


def command_lines(job: Job) -> str:
    """What everybody on this machine may read of the job's processes."""
    lines = []
    for process, line in running(job.process.pid).items():
        with contextlib.suppress(psutil.Error):
            lines += [*line, process.name()]
    return "\n".join(lines)


def listening(pid: int) -> set[tuple[int, str]]:
    """Every (pid, address) at which a process and its descendants listen."""
    found = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found |= {(process.pid, host) for host, _ in listeners(process.pid)}
    return found


@pytest.mark.proof
def test_the_tokens_stand_in_their_files_alone_and_a_job_on_loopback_listens_nowhere_else(tmp_path: Path) -> None:
    """torch's own listeners included."""
    tokens: dict[str, str] = {}
    found: set[tuple[int, str]] = set()
    said = ""
    where: list[set[str]] = []
    with Job(tmp_path, 60, replicas=2, network__interfaces=["lo", "127.0.0.2"]) as job:

        def ended() -> bool:
            nonlocal said, tokens
            said += command_lines(job)
            tokens |= {f: (job.run / f).read_text().strip() for f in NAMES if (job.run / f).exists()}
            if job.step() >= 2 and not found:
                told = launcher("status", "--json", "--runs-dir", str(job.run.parent), cwd=tmp_path)
                said += told.stdout + told.stderr
                ranks = {job.pid(replica, rank) for replica in (0, 1) for rank in (0, 1)}
                found.update(listening(job.process.pid))
                assert ranks <= {pid for pid, _ in found}
                where.extend({ip for pid, ip in found if pid == job.pid(0, rank)} for rank in (0, 1))
            return job.process.poll() is not None

        until(ended, "the end of the job", DEADLINE_S)
        assert job.process.returncode == 0, job.log.read_text()
    assert ["127.0.0.2" in each for each in where] == [False, True], "each rank has an interface of its own"
    assert [(pid, ip) for pid, ip in found if not ipaddress.ip_address(ip).is_loopback] == []
    assert "lighthouse" in said
    assert "replicas" in said
    assert sorted(tokens) == [*NAMES]
    files = [f for f in tmp_path.rglob("*") if f.is_file() and f.name not in tokens]
    assert len(files) > 10
    for name, token in tokens.items():
        assert len(token) == 64
        assert (job.run / name).stat().st_mode & 0o777 == 0o600
        for secret in (token, worker_token(token)):
            assert secret not in said
            assert not [file for file in files if secret.encode() in file.read_bytes()]
