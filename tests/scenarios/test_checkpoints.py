"""A whole job ends and another one goes on from its checkpoint, on other numbers of replicas and ranks."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.core.state_id import SLICES
from ft_hsdp.launch.run.directory import alive
from ft_hsdp.mounts import Ability
from ft_hsdp.state.checkpoint import catalog
from tests.support.os_faults import MODULE, POOR
from tests.support.scenarios.scenario_job import Job

pytestmark = pytest.mark.proof


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"checkpoint__every": 5, "checkpoint__keep": 9, "checkpoint__dir": str(folder / "checkpoints"), **more}


def trained(job: Job, batch: int) -> list[int]:
    """The batches of the whole data, of so many units, that a run's commits hold."""
    shards = len({c["shard"] for r in job.rows("replicas/0/commits.jsonl") for c in r["contributions"]})
    rows = job.rows("metrics.jsonl")
    steps = {r["step"]: r for n in range(3) for r in job.rows(f"replicas/{n}/commits.jsonl")}
    units = (
        (c["shard"], c["index"] + n)
        for r in rows
        for c in steps[r["step"]]["contributions"]
        for n in range(c["units"])
    )
    return sorted({unit // batch * shards + shard for shard, unit in units})


def test_on_other_numbers_of_replicas_and_ranks(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with Job(one, 12, **settings(tmp_path, replicas=2)) as job:
        job.ends_at(12)
        before = trained(job, 2)
    data = {"data.assignment": "global", "data.weight": "tokens"}
    more = {"replicas": 3, "ranks_per_replica": 1, "train.micro_batch": 4, **data}
    with Job(two, 28, **settings(tmp_path), **{k.replace(".", "__"): v for k, v in more.items()}) as job:
        job.until(lambda: job.step() >= 16, "step 16")
        job.signal(1, 0, signal.SIGKILL)
        job.ends_well(28)
        assert [r["step"] for r in job.rows("metrics.jsonl")] == list(range(13, 29))
        assert {e["step"] for e in job.events("StateRestored") if e["origin"] != "agent"} == {12}
        after = trained(job, 1)
        assert not set(before) & set(after), "a batch was trained by both jobs"


# The folder of checkpoints is on a poor file system, or is removed, or odd things stand in it.


def test_a_file_system_without_locks_links_and_fsync_of_folders_takes_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POOR, ":".join([f"{tmp_path}/checkpoints", Ability.LOCKS, Ability.SYNC, Ability.LINKS]))
    resumed: set[int] = set()
    for name, steps in (("one", 10), ("two", 15)):
        with Job(tmp_path / name, steps, **settings(tmp_path), replicas=2, preload=[MODULE]) as job:
            job.ends_at(steps)
            assert {e["step"] for e in job.events("StateRestored")} == resumed
            assert not job.events("CheckpointFailed")
        resumed = {steps}
    assert [path.name.split("-")[1] for path in catalog.published(tmp_path / "checkpoints")] == ["15", "10", "5"]


def test_a_folder_that_vanishes_is_made_again_and_the_end_says_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def steps() -> list[int]:
        return [int(path.name.split("-")[1]) for path in catalog.published(folder)]

    def job(name: str) -> Job:
        return Job(tmp_path / name, 5000, **settings(tmp_path, replicas=2, checkpoint__keep=2))

    with job("one") as one:
        one.until(steps, "a checkpoint")
        shutil.rmtree(folder.rename(tmp_path / "gone"))  # at once: the job writes into it
        one.until(lambda: len(steps()) == 2, "two checkpoints in a new folder")
        odd = catalog.published(folder)[0]
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pipe").rename(odd / "manifest.json")
        one.until(lambda: not odd.exists(), "the checkpoint with a pipe as its manifest is retired")
        one.until(lambda: len(steps()) == 2, "two others")
        one.process.send_signal(signal.SIGTERM)
        last = one.end(128 + signal.SIGTERM)["steps"]
        assert steps()[0] == last
        assert f"the state of step {last} is in" in one.log.read_text().splitlines()[-1]
    with job("two") as two:
        two.until(lambda: two.events("CheckpointWritten"), "a checkpoint of its own")
        ranks = two.ranks(0) + two.ranks(1)
        two.process.send_signal(signal.SIGTERM)
        two.until(lambda: "stopping:" in two.log.read_text(), "the launcher has passed it on")
        two.process.send_signal(signal.SIGSTOP)  # it neither reaps ranks nor looks at the folder
        two.until(lambda: not any(map(alive, ranks)), "the ranks have ended")
        for path in catalog.published(folder):
            shutil.rmtree(path)
        two.process.send_signal(signal.SIGCONT)
        summary = two.end(75)
        assert {e["step"] for e in two.events("StateRestored")} == {last}
        assert f"of step {summary['steps']} is gone: there is none" in two.log.read_text().splitlines()[-1]


# A copy of a state, or a rank's own memory, is damaged or missing: found before it is used, no halt.


STEPS = 30


def test_a_copy_that_one_rank_left_out_costs_no_older_one(tmp_path: Path) -> None:
    """Rank 1 has no memory for step 8; rank 0, and with it the replica, dies while it copies step 9."""
    points = {
        "snapshot-out": {"replicas": [0], "rank": 1, "step": 8},
        "snapshot": {"replicas": [0], "rank": 0, "step": 9},
    }
    steps = 16
    with Job(tmp_path, steps, replicas=1, debug__failpoints=points, quorum__on_lost_head="rollback") as job:
        job.ends_well(steps)
        assert job.events("SnapshotSkipped", replica=0, rank=1, step=8)
        (restored,) = job.events("StateRestored", replica=0)
        assert (restored["step"], restored["origin"]) == (7, "agent")


@pytest.mark.soak
def test_the_one_of_two_whose_memory_changed_ends_and_comes_back_with_its_copy(tmp_path: Path) -> None:
    """A slice is compared at each step: that of the flipped byte is looked at after step 16."""
    points = {"live-flip": {"replicas": [1], "rank": 0, "step": SLICES}}
    with Job(tmp_path, STEPS, replicas=2, debug__failpoints=points) as job:
        job.ends_well(STEPS)
        (found,) = job.events("StateCorrupt", replica=1, rank=0)
        assert "slice 0 of" in found["reason"]
        assert job.events("StateRestored", replica=1, origin="agent")
        assert not job.events("JobHalted")
        assert not job.events("StateDiverged")


# The replica that writes a checkpoint is killed while it writes: another one, or its next life, writes one.


WRITER_STEPS = 24
EVERY = 12


def written(folder: Path, replicas: int, life: int, step: int) -> tuple[list[int], list[dict[str, Any]]]:
    """The steps of the checkpoints of a job whose writer dies at ``step``, and who started on them."""
    point = {"replicas": [0], "rank": 0, "life": life, "step": step}
    settings = {
        "checkpoint__every": EVERY,
        "checkpoint__keep": 9,
        "debug__failpoints": {"checkpoint-write": point},
    }
    with Job(folder, WRITER_STEPS, replicas=replicas, **settings) as job:
        job.ends_at(WRITER_STEPS)
        published = catalog.published(job.run / "checkpoints")
        return sorted(int(path.name.split("-")[1]) for path in published), job.events("CheckpointStarted")


def test_a_survivor_writes_the_next_state_instead(tmp_path: Path) -> None:
    steps, started = written(tmp_path, 2, 0, EVERY)
    assert EVERY not in steps, "its writer did not die"
    assert EVERY < steps[0] < WRITER_STEPS
    assert [e["replica"] for e in started if e["step"] == steps[0]] == [1]


@pytest.mark.parametrize("replicas", [2, 1])
def test_the_final_state_is_written_all_the_same(tmp_path: Path, replicas: int) -> None:
    steps, started = written(tmp_path, replicas, 0, WRITER_STEPS)
    assert steps == [EVERY, WRITER_STEPS]
    assert len([e for e in started if e["step"] == WRITER_STEPS]) >= 2, "its writer did not die"
