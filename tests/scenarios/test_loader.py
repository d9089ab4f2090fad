"""A job over `job.loader` whose ranks and workers are killed: which samples count, and how often."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from ft_hsdp.train.data.samples import JobShape, SampleReader
from tests.support.torchrun_job import ROOT, TorchrunJob, check
from tests.support.train.loader_loop import BATCH, Slow

LOOP = ROOT / "tests" / "support" / "train" / "loader_loop.py"
REPLICAS, RANKS, STEPS = 2, 2, 250
SETTINGS = f"""
replicas: {REPLICAS}
ranks_per_replica: {RANKS}
train: {{steps: {STEPS}}}
"""


def fed(folder: Path, replica: int, rank: int) -> dict[int, list[tuple[list[int], list[float]]]]:
    """What a rank was fed for each step, in every life."""
    found: dict[int, list[tuple[list[int], list[float]]]] = {}
    for line in (folder / f"fed-{replica}-{rank}.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], []).append((row["samples"], row["noise"]))
    return found


def worker_of(torchrun: psutil.Process, rank: int) -> psutil.Process:
    """A process that reads for a rank."""
    parent = next(c for c in torchrun.children() if c.environ().get("RANK") == str(rank))
    return next(c for c in parent.children() if c.name() == "pt_data_worker")


@pytest.mark.proof
def test_each_sample_counts_once_though_a_rank_and_a_worker_are_killed(tmp_path: Path) -> None:
    with TorchrunJob(tmp_path, SETTINGS) as job:
        replicas = [job.torchrun(r, RANKS, LOOP) for r in range(REPLICAS)]
        job.until(lambda: min(job.step(0), job.step(1)) >= 8, "step 8")
        job.kill(replicas[1], 1)
        job.until(lambda: _both_after_one(job.rows(0)), "the replica is back")
        worker_of(psutil.Process(replicas[0].pid), 1).send_signal(signal.SIGKILL)
        check(job.finals(replicas), STEPS, ["1", "1"])
        assert "the data of this rank: worker process" in (tmp_path / "replica0.log").read_text()
        rows = max((job.rows(r) for r in range(REPLICAS)), key=len)
        commits = {row["step"]: row for r in range(REPLICAS) for row in job.rows(r)}
    assert sorted(commits) == list(range(1, STEPS + 1)), rows[-1]
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
    steps, kinds = 120, ["stateful", "plain"]
    with TorchrunJob(tmp_path, SETTINGS.replace(f"steps: {STEPS}", f"steps: {steps}")) as job:
        replicas = [job.torchrun(r, RANKS, LOOP, kinds[r]) for r in range(REPLICAS)]
        job.until(lambda: min(job.step(0), job.step(1)) >= 80, "step 80")
        for replica in range(REPLICAS):
            job.kill(replicas[replica], replica)
        check(job.finals(replicas), steps, ["1", "1"])
        commits = {row["step"]: row for r in range(REPLICAS) for row in job.rows(r)}
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
            assert (passed >= 80) is (kinds[replica] == "plain"), f"{passed} items were read again"


def _both_after_one(rows: list[dict[str, Any]]) -> bool:
    """Whether both replicas contribute again."""
    alone = [row["step"] for row in rows if len(row["contributors"]) == 1]
    return bool(alone) and len(rows[-1]["contributors"]) == REPLICAS
