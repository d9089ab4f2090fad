"""The replica that writes a checkpoint is killed while it writes: another one, or its next life, writes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.state.checkpoint import catalog
from tests.support.scenarios.scenario_job import Job, check

pytestmark = [pytest.mark.multiproc, pytest.mark.proof]

STEPS = 40
EVERY = 20


def written(folder: Path, replicas: int, life: int, step: int) -> tuple[list[int], list[dict[str, Any]]]:
    """The steps of the checkpoints of a job whose writer dies at ``step``, and who started on them."""
    point = {"replicas": [0], "rank": 0, "life": life, "step": step}
    settings = {
        "checkpoint__every": EVERY,
        "checkpoint__keep": 9,
        "debug__failpoints": {"checkpoint-write": point},
    }
    with Job(folder, STEPS, replicas=replicas, **settings) as job:
        check(job.end(), STEPS)
        published = catalog.published(job.run / "checkpoints")
        return sorted(int(path.name.split("-")[1]) for path in published), job.events("CheckpointStarted")


def test_a_survivor_writes_the_next_state_instead(tmp_path: Path) -> None:
    steps, started = written(tmp_path, 3, 0, EVERY)
    assert EVERY not in steps, "its writer did not die"
    assert EVERY < steps[0] < EVERY + 5
    assert [e["replica"] for e in started if e["step"] == steps[0]] == [1]


def test_a_replica_that_is_alone_writes_it_in_its_next_life(tmp_path: Path) -> None:
    steps, _ = written(tmp_path, 1, 0, EVERY)
    assert EVERY not in steps, "its writer did not die"
    assert EVERY < steps[0] < EVERY + 5


@pytest.mark.parametrize("replicas", [2, 1])
def test_the_final_state_is_written_all_the_same(tmp_path: Path, replicas: int) -> None:
    steps, started = written(tmp_path, replicas, 0, STEPS)
    assert steps == [EVERY, STEPS]
    assert len([e for e in started if e["step"] == STEPS]) >= 2, "its writer did not die"
