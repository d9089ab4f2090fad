"""A job over `job.loader` whose ranks and workers are killed: which samples count, and how often."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.train.data.samples import JobShape, SampleReader
from tests.support.scenarios.scenario_job import ROOT, Job
from tests.support.train.loader_loop import BATCH, Slow

LOOP = ROOT / "tests" / "support" / "train" / "loader_loop.py"
REPLICAS, RANKS = 2, 2
STEPS = 200  # they must last until both replicas are back, on a slow machine, too; then they take no time
AT = 40  # where both are killed; more than one second into the job
SETTINGS: dict[str, Any] = {"replicas": REPLICAS, "ranks_per_replica": RANKS, "entry": str(LOOP)}


def fed(folder: Path, replica: int, rank: int) -> dict[int, list[tuple[list[int], list[float]]]]:
    found: dict[int, list[tuple[list[int], list[float]]]] = {}
    for line in (folder / f"fed-{replica}-{rank}.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], []).append((row["samples"], row["noise"]))
    return found


def worker_of(job: Job, replica: int, rank: int) -> psutil.Process:
    pid = job.pid(replica, rank)
    assert pid is not None
    return next(c for c in psutil.Process(pid).children() if c.name() == "pt_data_worker")


def commits_of(job: Job) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for r in range(REPLICAS) for row in job.rows(f"replicas/{r}/commits.jsonl")}


def slowest(job: Job) -> int:
    """The newest step that both replicas committed."""
    return min(
        rows[-1]["step"] if (rows := job.rows(f"replicas/{r}/commits.jsonl")) else 0 for r in range(REPLICAS)
    )


def both_again(job: Job, lost: int) -> bool:
    """Whether both contribute to the newest commit, and did not to one since a replica was killed."""
    rows = job.rows(f"replicas/{1 - lost}/commits.jsonl")
    started = job.events("ReplicaStarted", replica=lost)
    return len(started) == 2 and len(rows[-1]["contributors"]) == REPLICAS and rows[-1]["t"] > started[-1]["t"]


@pytest.mark.proof
def test_each_sample_counts_once_though_a_rank_and_a_worker_are_killed(tmp_path: Path) -> None:
    with Job(tmp_path, STEPS, **SETTINGS) as job:
        job.until(lambda: slowest(job) >= 8, "step 8")
        job.signal(1, 1, signal.SIGKILL)
        job.until(lambda: both_again(job, 1), "the replica is back")
        worker_of(job, 0, 1).send_signal(signal.SIGKILL)
        job.until(lambda: both_again(job, 0), "the other one is back")
        job.hurry()
        summary = job.ends_at(STEPS)
        assert [summary["replicas"][r]["incarnations"] for r in "01"] == [2, 2]
        ended = job.events("ProcessExited", replica=0, rank=1)[0]
        assert "worker process" in ended["reason"]
        commits = commits_of(job)
    assert sorted(commits) == list(range(1, STEPS + 1))
    shape = JobShape(REPLICAS, REPLICAS, RANKS, 1)
    reader = SampleReader(Slow(), BATCH, None, True, True, 0)
    counted: Counter[tuple[int, int]] = Counter()
    for step, row in commits.items():
        for part in row["contributions"]:
            index, units = part["index"], part["units"]
            assert (index % RANKS, units) == (0, RANKS)
            for rank in range(RANKS):
                number = shape.number(part["shard"], index // RANKS, rank, 0)
                epoch, samples = reader.samples_of(number)
                counted.update((epoch, sample) for sample in samples)
                was = [s for s, _ in fed(tmp_path, part["replica"], rank)[step]]
                assert was, "nothing is counted that was not fed"
                assert all(s == samples for s in was)
    assert set(counted.values()) == {1}
    contributions = sum(len(row["contributions"]) for row in commits.values())
    assert len(counted) == contributions * RANKS * BATCH
    alone = [len(row["contributors"]) for row in commits.values()]
    assert 1 in alone, "the survivor waited"


@pytest.mark.proof
def test_a_stream_of_which_both_replicas_are_killed_repeats_and_skips_nothing(tmp_path: Path) -> None:
    """One has a state that is saved; the other one is read again from its beginning."""
    steps, plain = AT + 20, 1
    with Job(tmp_path, steps, **SETTINGS, args=["stream"]) as job:
        job.until(lambda: slowest(job) >= AT, f"step {AT}")
        for replica in range(REPLICAS):
            job.signal(replica, replica, signal.SIGKILL)
        job.hurry()
        summary = job.ends_at(steps)
        assert [summary["replicas"][r]["incarnations"] for r in "01"] == [2, 2]
        commits, restored = commits_of(job), {e["replica"]: e["step"] for e in job.events("StateRestored")}
    for replica in range(REPLICAS):
        mine = sorted(step for step in commits if replica in commits[step]["contributors"])
        for rank in range(RANKS):
            rows = fed(tmp_path, replica, rank)
            counted = [rows[step][-1][0][0] for step in mine]
            shard, shards = replica * RANKS + rank, REPLICAS * RANKS
            assert counted == [shard + n * shards for n in range(len(mine))], "0 repeated, 0 skipped"
            reads = [int(noise) for step in sorted(rows) for _, (noise,) in rows[step]]
            lives = [n for n in range(1, len(reads)) if reads[n] != reads[n - 1] + 1]
            passed = reads[lives[0]] - 1 if lives else reads[-1]
            before = sum(step <= restored[replica] for step in mine)  # it may have come late
            assert (passed >= before) is (replica == plain), f"{passed} items were read again, {before} counted"
