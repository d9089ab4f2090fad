"""Evaluation inside a real job, while a replica dies in it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.scenarios.scenario_job import Job

pytestmark = [pytest.mark.proof, pytest.mark.multiproc]
STEPS, EVERY = 20, 5


def evaluating(folder: Path) -> dict[str, Any]:
    (folder / "other.txt").write_text("".join(f"line {n} of another text\n" for n in range(400)))
    return {"eval__every": EVERY, "eval__batches": 7, "eval__data": str(folder / "other.txt")}


def test_a_loss_in_an_evaluation_costs_neither_a_value_nor_a_step(tmp_path: Path) -> None:
    point = {"evaluation": {"replicas": [1], "rank": 1, "step": 10}}
    with Job(tmp_path, STEPS, **evaluating(tmp_path), debug__failpoints=point) as job:
        summary = job.ends_well(STEPS)
        assert [summary["replicas"][r]["incarnations"] for r in "012"] == [1, 2, 1]
        found = [(row["step"], row["logged"]["eval_loss"]) for row in job.rows("metrics.jsonl") if "logged" in row]
        assert [step for step, _ in found] == [*range(EVERY, STEPS + 1, EVERY)], "each value once"
        rows = [job.rows(f"replicas/{r}/logged.jsonl") for r in range(3)]
        told = [{row["step"]: row["values"]["eval_loss"] for row in each} for each in rows]
        assert told[0] == told[2] == dict(found), "the same bits"
        assert {*told[1].items()} <= {*found} - {(10, told[0][10])}, "it died before, and did not do it again"
        assert [row["step"] for row in job.journal("logged")] == [step for step, _ in found]
        assert not job.events("CulpritFound") + job.events("ReplicaStalled") + job.events("JobDoubted")


def test_training_has_the_same_bits_with_and_without_it(tmp_path: Path) -> None:
    digests = set()
    for name in ("with", "without"):
        (folder := tmp_path / name).mkdir()
        settings = evaluating(folder) if name == "with" else {}
        with Job(folder, STEPS, quorum__min_replicas=3, **settings) as job:
            digests |= {row["digest"] for row in job.end()["replicas"].values()}
    assert len(digests) == 1
