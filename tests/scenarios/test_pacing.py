from pathlib import Path

import pytest

from ft_hsdp.state.pacing import PROFILED
from tests.support.scenarios.scenario_job import Job, check

STEPS = PROFILED + 5


@pytest.mark.proof
def test_ranks_whose_shards_are_copied_measure_their_idle_spans_and_no_others(tmp_path: Path) -> None:
    for replicas, watched in ((1, {0, 1}), (2, set[int]())):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        hosts = {"hosts.per_replica": 2}
        with Job(folder, STEPS, replicas=replicas, **hosts) as job:
            check(job.end(), STEPS)
            told = job.events("CopiesPaced")
            assert {row["rank"] for row in told} == watched
            assert all(row["spans"] > 1 for row in told), "FSDP2 communicates several times a step"
