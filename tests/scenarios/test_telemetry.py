"""Whatever a job's processes write down reaches the lighthouse over the network, and no step waits for that."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from scenario_job import Job, check

pytestmark = pytest.mark.multiproc


def overview(job: Job) -> dict[str, Any]:
    """What the lighthouse shows; nothing while it does not answer."""
    try:
        url = json.loads((job.run / "lighthouse.json").read_text())["url"]
        headers = {"Authorization": f"Bearer {(job.run / 'token').read_text().strip()}"}
        answer = httpx.get(f"{url}/v1/overview?points=2", headers=headers, timeout=5, trust_env=False)
        return dict(answer.raise_for_status().json())
    except (OSError, httpx.HTTPError):
        return {"replicas": []}


def progress(job: Job) -> dict[tuple[int, int], int]:
    """How far the trainer of each rank is that the lighthouse has heard."""
    replicas = overview(job)["replicas"]
    return {(r["replica"], rank["rank"]): rank["progress"] for r in replicas for rank in r["ranks"]}


def journal(job: Job, kind: str) -> list[dict[str, Any]]:
    """The rows of the lighthouse's journal."""
    with sqlite3.connect(job.run / "lighthouse" / "journal.sqlite") as db:
        rows = db.execute("SELECT body FROM rows WHERE kind = ? ORDER BY seq", (kind,)).fetchall()
    db.close()
    return [json.loads(body) for (body,) in rows]


def everything_is_there(job: Job) -> None:
    """All events and commits of the run's files are in the journal, once."""
    written = Counter((e["event"], e["t"]) for e in job.rows("events.jsonl"))
    told = Counter((e["event"], e["t"]) for e in journal(job, "event"))
    assert not written - told, "events are missing"
    assert {n for n, t in told - written} <= {"ReplicaStalled", "ReplicaResumed", "StragglerSeen", "StragglerGone"}
    logs = [job.rows(f"replicas/{n}/commits.jsonl") for n in range(3)]
    commits = [(row["step"], row["lineage"]) for row in journal(job, "commit")]
    assert set(commits) == {(row["step"], row["lineage"]) for log in logs for row in log}
    assert len(commits) == len(set(commits))


def test_the_lighthouse_hears_all_and_is_waited_for_by_nobody(tmp_path: Path) -> None:
    with Job(tmp_path, 12, replicas=2) as job:
        everybody = {(replica, rank) for replica in (0, 1) for rank in (0, 1)}
        job.until(lambda: set(progress(job)) == everybody, "all ranks are heard")
        first = progress(job)
        job.until(lambda: all(now > first[rank] for rank, now in progress(job).items()), "all get on")
        check(job.end(), 12)
        everything_is_there(job)
        waits = [row["waits"]["quorum"] for row in job.rows("metrics.jsonl")]
        print(f"exposed wait for the lighthouse: median {statistics.median(waits) * 1e3:.3f} ms, {waits}")
        assert statistics.median(waits) < 0.001


@pytest.mark.soak
def test_a_killed_rank_and_a_killed_lighthouse_cost_no_row(tmp_path: Path) -> None:
    steps = 100  # they must last until it is back, on a fast machine, too
    with Job(tmp_path, steps) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        job.signal(1, 1, signal.SIGKILL)
        job.until(lambda: len(job.events("Rejoined", replica=1)) > 0, "it is back")
        os.kill(json.loads((job.run / "lighthouse.json").read_text())["pid"], signal.SIGKILL)
        check(job.end(), steps)
        everything_is_there(job)


@pytest.mark.proof
def test_a_rank_that_is_stopped_is_seen_to_be_silent(tmp_path: Path) -> None:
    with Job(tmp_path, 400) as job:
        job.until(lambda: len(progress(job)) == 6 and job.step() >= 3, "all ranks are heard")
        job.signal(2, 1, signal.SIGSTOP)

        def silent() -> bool:
            replicas = overview(job)["replicas"]
            ages = {(r["replica"], rank["rank"]): rank["age_s"] for r in replicas for rank in r["ranks"]}
            return (2, 1) not in ages or ages[2, 1] > 2.5

        job.until(silent, "its beats are missed", 30)
