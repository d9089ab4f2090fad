"""A replica that cannot reach the lighthouse for longer than its lease: a planned stop, and it comes back."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.tcp_proxy import Proxy
from tests.support.torchrun_job import TorchrunJob

SETTINGS = """
replicas: 2
ranks_per_replica: 1
train: {steps: 100000, micro_batch: 1, seq_len: 32}
model: {dim: 64, layers: 2, heads: 2}
data: {path: stdlib, max_bytes: 1048576}
quorum: {lease_s: 2.0}
timeouts: {evict_s: 1.5, connect_s: 2.0, reach_s: 2.0}
ftar: {timeout_s: 3.0}
restart: {budget: 1}
"""


@pytest.mark.multiproc
@pytest.mark.proof
def test_a_replica_that_is_cut_off_from_the_lighthouse_beyond_its_lease_is_not_lost(tmp_path: Path) -> None:
    with TorchrunJob(tmp_path, SETTINGS) as job:
        url = json.loads((job.run / "lighthouse.json").read_text())["url"]
        secret = (job.run / "token").read_text().strip()
        with Proxy(int(url.rpartition(":")[2])) as proxy:
            job.replica(0)
            far = ["--lighthouse", f"http://127.0.0.1:{proxy.port}", f"--job.runs_dir={tmp_path / 'far'}"]
            job.replica(1, *far, FT_HSDP_TOKEN=secret)
            elsewhere = tmp_path / "far/job/replicas/1"

            def events(replica: int, name: str) -> list[dict[str, Any]]:
                file = "events.jsonl" if replica == 0 else str(elsewhere / "events.jsonl")
                return [e for e in job.rows(replica, file) if e["event"] == name]

            def contributors() -> list[int]:
                rows = job.rows(0)
                return rows[-1]["contributors"] if rows else []

            job.until(lambda: contributors() == [0, 1] and job.step(0) >= 5, "both train")
            proxy.cut()
            job.until(lambda: events(1, "LeaseEnded"), "the lease of replica 1 ends")
            job.until(lambda: contributors() == [0], "replica 0 goes on alone")
            alone, began = job.step(0), time.monotonic()
            job.until(lambda: job.step(0) > alone + 3 and time.monotonic() > began + 4.0, "it trains on, for long")
            assert not events(0, "RankEnded"), "the healthy one was held to hang"
            assert not events(1, "RankEnded"), "the one that is cut off was held to hang"
            proxy.mend()
            job.until(lambda: contributors() == [0, 1], "replica 1 contributes again")
            assert len(events(0, "CheckedIn")) == 1, "the healthy one was started again"
            supervised = {e["event"] for e in job.rows(1, str(elsewhere / "supervisor.jsonl"))}
            assert "ReplicaStarted" in supervised
            assert "ReplicaLost" not in supervised
