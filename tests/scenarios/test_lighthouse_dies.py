"""SIGKILL of the lighthouse: a membership that works goes on under its lease."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from scenario_job import Job, check

pytestmark = pytest.mark.multiproc


def test_training_goes_on_and_the_epoch_stays(tmp_path: Path) -> None:
    """Nobody exits, no epoch is lost; a replica that dies meanwhile heals once the lighthouse is back."""
    steps = 50
    with Job(tmp_path, steps) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        pid = json.loads((job.run / "lighthouse.json").read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        at = job.step()
        job.until(lambda: job.step() >= at + 5, "training goes on")
        job.signal(2, 1, signal.SIGKILL)
        summary = job.end()
        check(summary, steps)
        rows = job.rows("metrics.jsonl")
        before = {r["epoch"] for r in rows if r["step"] <= at + 4}
        assert before == {1}, "the lighthouse's death changed the epoch"
        assert rows[-1]["contributors"] == [0, 1, 2], "replica 2 did not come back"
        terms = [e["term"] for e in job.events("EpochGranted")]
        assert terms == sorted(terms)
        assert terms[-1] > terms[0], "the new lighthouse has no higher term"
        assert job.replayed()["equal"]
