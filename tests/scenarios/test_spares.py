import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import run_by
from tests.support.scenarios.scenario_job import Job

WARM = "from a spare"


def spares(job: Job, state: str = "ready") -> list[list[int]]:
    """Pids of the spares in that state."""
    try:
        listed = json.loads((job.run / "spares" / "spares.json").read_text())["spares"]
    except OSError:
        return []
    return [[rank["pid"] for rank in spare["ranks"]] for spare in listed if spare["state"] == state]


def ready(job: Job) -> list[int]:
    job.until(lambda: spares(job), "a spare is ready")
    return spares(job)[0]


def starts(job: Job, replica: int) -> list[dict[str, Any]]:
    return job.events("ReplicaStarted", replica=replica)


def settled(job: Job) -> None:
    """No process of the run is left at its end."""
    assert not run_by(str(job.run))
    called = [tuple(e["pids"]) for e in job.events("ReplicaStarted", how=WARM)]
    assert len(set(called)) == len(called), "a spare was called twice"


def test_a_replica_that_lost_a_rank_goes_on_in_a_spare(tmp_path: Path) -> None:
    with Job(tmp_path, 100, replicas=2, spares=2) as job:
        pids = ready(job)
        job.signal(1, 1, signal.SIGKILL)
        job.until(lambda: len(starts(job, 1)) == 2, "the second life")
        job.ends_at(100)
        settled(job)
        first, second = starts(job, 1)
        assert (first["how"], second["how"], second["pids"]) == ("cold", WARM, pids)
        assert {e["replica"] for e in job.events("ReplicaStarted", how=WARM)} == {1}
        (restored,) = job.events("StateRestored", replica=1)
        assert restored["origin"] == "agent"
        life = second["incarnation"]
        names = [e["event"] for e in job.rows("replicas/1/events.jsonl") if e["incarnation"] == life]
        told = ["ReplicaBooted", "ReplicaWarmed", "StateRestored", "CheckedIn", "FirstStepCommitted"]
        assert [n for n in names if n in told] == told


@pytest.mark.proof
def test_a_spare_that_dies_is_nobodys_failure_and_one_that_dies_while_it_is_promoted_is_one_like_others(
    tmp_path: Path,
) -> None:
    """The second one dies on its first look at the state, before its replica has checked in, or soon after."""
    with Job(tmp_path, 160, replicas=2, spares=2) as job:
        first = ready(job)
        os.kill(first[0], signal.SIGKILL)
        job.until(lambda: spares(job) and ready(job) != first, "another spare")
        pids = ready(job)
        job.signal(1, 0, signal.SIGKILL)
        job.until(lambda: len(starts(job, 1)) == 2, "the second life")
        os.kill(pids[0], signal.SIGKILL)
        summary = job.ends_well(160)
        settled(job)
        assert job.events("SpareLost")[0]["pids"] == first
        assert summary["replicas"]["1"]["incarnations"] == 3
        assert [failure["replica"] for failure in summary["failures"]] == [1, 1], "not the spare that was killed"
