"""Jobs whose model was sharded by the user's own calls of `fully_shard`."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.cases import CASES
from tests.compatibility.test_compatibility import SCRIPT
from tests.support.scenarios.scenario_job import ROOT, Job
from tests.support.started_job import check

pytestmark = pytest.mark.multiproc

TWO: dict[str, Any] = {"replicas": 2, "ranks_per_replica": 2}


@pytest.mark.proof
def test_healing_a_lora_job_fetches_the_adapters_alone(tmp_path: Path) -> None:
    steps = 80
    settings = {**TWO, "entry": str(SCRIPT), "args": ["lora", str(tmp_path / "weights.pt"), "0.1"]}
    with Job(tmp_path, steps, **settings) as job:
        job.until(lambda: job.step() >= 10, "step 10")
        job.signal(1, 1, signal.SIGKILL)
        job.until(lambda: job.events("Rejoined", replica=1), "it is back")
        job.hurry()
        summary = job.end()
        check(summary, steps)
        assert [summary["replicas"][r]["incarnations"] for r in "01"] == [1, 2]
        rows = job.rows("replicas/0/commits.jsonl")
        assert [r["step"] for r in rows] == list(range(1, steps + 1)), "the survivor missed a step"
        assert rows[-1]["loss"] < rows[0]["loss"]
        fetched = [e["bytes"] for e in job.events("FetchCompleted", replica=1)]
    params = list(CASES["lora"].model().parameters())
    adapters = sum(p.nbytes for p in params if p.requires_grad)
    assert sum(p.nbytes for p in params) > 20 * adapters
    assert len(fetched) >= 2, "a fetch of each rank"
    assert max(fetched) <= 2 * adapters, "half of the adapters, and of AdamW's two tensors of their size"


MOVING = ROOT / "tests" / "support" / "state" / "moving_loop.py"
KINDS = {
    "codebook": ("codebook.codes", "state"),
    "spectral norm": ("body.parametrizations.weight.0._?", "state"),
    "observer": ("observer.[lh]*[wh]", "state"),
    "counter": ("observer.looks", "state"),
    "bias": ("bias", "mean"),
    "teacher": ("teacher.*", "state"),
}


def moving(*left_out: str, when: str = "before", ranks: int = 1) -> dict[str, Any]:
    """A job whose forward, loop and callback change tensors of each kind, all of them declared but some."""
    buffers = dict(kind for name, kind in KINDS.items() if name not in left_out)
    args = [json.dumps(buffers), when]
    return {"replicas": 2, "ranks_per_replica": ranks, "entry": str(MOVING), "args": args}


@pytest.mark.proof
def test_what_training_changes_is_the_same_after_a_loss(tmp_path: Path) -> None:
    kill = {"at_step": 3, "replicas": [0], "rank": 0}
    with Job(tmp_path, 8, **moving(), quorum__min_replicas=2, chaos=[kill]) as job:
        check(job.end(), 8)
        assert not job.events("JobDoubted")
        assert not job.events("BufferChanged", over=True)


@pytest.mark.soak
def test_it_is_resumed_and_replayed_bit_for_bit(tmp_path: Path) -> None:
    digests = []
    for name, steps in (("whole", [12]), ("parts", [6, 12])):
        for number, until in enumerate(steps):
            folder = tmp_path / f"{name}{number}"
            folder.mkdir()
            kept = {"checkpoint__dir": str(tmp_path / name), "checkpoint__every": 6, "train__accumulate": 2}
            kill = {"at_step": 3 + 6 * number, "replicas": [1], "rank": 1}
            chaos = [] if name == "whole" else [kill]
            with Job(folder, until, **moving(ranks=2), **kept, quorum__min_replicas=2, chaos=chaos) as job:
                ended = {r["digest"] for r in job.end()["replicas"].values()}
                assert job.replayed()["equal"]
        digests.append(ended)
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1


@pytest.mark.soak
def test_what_changes_later_is_told_and_ends_no_job(tmp_path: Path) -> None:
    with Job(tmp_path, 12, **moving("bias", when="after 5")) as job:
        summary = job.end()
        assert summary["steps"] == 12
        assert summary["doubted"] == ["bias"]
        assert {e["tensor"] for e in job.rows("events.jsonl") if e["event"] == "JobDoubted"} == {"bias"}
