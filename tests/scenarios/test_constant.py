"""configs/constant.yaml, as the docs have a user run it, but shorter."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import ROOT, Job, check
from tests.support.started_job import StartedJob

STEPS, AT, AWAY, VICTIM = 45, 8, 15, 2
RULE = {"at_step": AT, "replicas": [VICTIM], "rank": 0, "signal": "KILL", "down_steps": AWAY}


class Example(Job):
    def __init__(self, folder: Path, **settings: object) -> None:
        settings = {"job.runs_dir": str(folder / "runs"), **settings}
        overrides = [f"--{key}={json.dumps(value)}" for key, value in settings.items()]
        command = [
            sys.executable,
            str(ROOT / "launcher.py"),
            "up",
            str(ROOT / "configs/constant.yaml"),
            *overrides,
        ]
        StartedJob.__init__(self, command, folder, folder / "runs" / "constant", folder / "up.log")


@pytest.mark.proof
@pytest.mark.parametrize("refill", [pytest.param("next_step", marks=pytest.mark.soak), "same_step"])
def test_each_step_has_its_units_while_a_replica_is_away(tmp_path: Path, refill: str) -> None:
    settings = {"train.steps": STEPS, "chaos": [RULE], "quorum.refill": refill}
    with Example(tmp_path, **settings, **{"data.max_bytes": 1 << 20}) as job:
        check(job.end(), STEPS)
        rows = job.rows("metrics.jsonl")
        assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
        away = [row["step"] for row in rows if row["contributors"] == [0, 1, 3]]
        assert len(away) >= AWAY
        assert len([row for row in rows if len(row["contributors"]) == 4]) >= AT, "it was never whole"
        short = [row["step"] for row in rows if row["units"] != row["units_wanted"]]
        whole_at = next(row["step"] for row in rows if len(row["contributors"]) == 4)
        late = [step for step in short if step > whole_at]
        assert late in ([], away[:1] if refill == "next_step" else [])
        assert {row["units_wanted"] for row in rows} == {12}
        assert job.replayed()["equal"]
