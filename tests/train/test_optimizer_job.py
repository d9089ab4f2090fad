"""A job with several optimizers and torch's schedulers that is killed, and resumed."""

import json
from typing import Any

import pytest

from tests.support.scenarios.scenario_job import ROOT, Job
from tests.support.started_job import check

LOOP = ROOT / "tests" / "support" / "launch" / "muon_loop.py"
SETTINGS: dict[str, Any] = {
    "replicas": 2,
    "ranks_per_replica": 2,
    "train__micro_batch": 16,
    "lr__intervention": "none",
}
NARROW = {"ranks_per_replica": 1, "train__accumulate": 2}  # one rank trains what two had


@pytest.mark.multiproc
@pytest.mark.proof
@pytest.mark.parametrize(
    ("wanted", "width"), [(["--many"], {}), (["--many", "--exact"], NARROW)], ids=["same width", "other width"]
)
def test_a_killed_job_that_is_resumed_ends_as_one_that_never_stopped(tmp_path, wanted, width) -> None:
    """Muon, AdamW, Adam and SGD; plateau, exponential, cosine and one-cycle schedules, and a rate set by hand."""
    steps, kept, ends = 12, tmp_path / "kept", []
    for name in ("whole", "killed", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        if name != "killed":
            (folder / "hurry").touch()
        own = {"entry": str(LOOP), "args": [str(folder), *wanted], "quorum__min_replicas": 2}
        own |= {"checkpoint__every": 4, "checkpoint__dir": str(folder if name == "whole" else kept)}
        with Job(folder, steps, **{**SETTINGS, **own, **(width if name == "resumed" else {})}) as job:
            if name == "killed":
                job.until(lambda: list(kept.glob("step-4-*")), "a checkpoint")
                job.until(lambda: job.step() >= 6, "step 6")
                job.process.kill()
                continue
            summary = job.end()
            check(summary, steps)
            assert not job.events("SettingChanged")
            (digest,) = {replica["digest"] for replica in summary["replicas"].values()}
            seen = json.loads((folder / "0-0.json").read_text())
            ends.append((digest, seen, [row["lr"] for row in job.rows("replicas/0/commits.jsonl")][-4:]))
    assert 4 < job.rows("replicas/0/commits.jsonl")[0]["step"] <= steps - 4, "it was not resumed midway"
    assert ends[0] == ends[1]
