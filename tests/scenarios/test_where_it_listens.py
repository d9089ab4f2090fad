"""A real job on one machine: where its processes listen, torch's own listeners included."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import psutil
import pytest

from tests.support.scenarios.scenario_job import Job

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]


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


def test_a_job_on_loopback_listens_nowhere_else(tmp_path: Path) -> None:
    with Job(tmp_path, 200, replicas=2, ranks_per_replica=2) as job:
        job.until(lambda: job.step() >= 2, "two steps are committed")
        ranks = {job.pid(replica, rank) for replica in (0, 1) for rank in (0, 1)}
        found = listeners(job.process.pid)
        assert ranks <= {pid for pid, _ in found}
        assert [(pid, ip) for pid, ip in found if not ipaddress.ip_address(ip).is_loopback] == []
