"""A job whose loop averages weights, evaluates in a pause and logs, over the loss of a rank; as a user runs it."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.status import lines, status
from tests.support.averaging_loop import EVALUATION_S, EVERY
from tests.support.scenarios.scenario_job import ROOT, Job
from tests.support.started_job import check

SCRIPT = ROOT / "tests" / "support" / "averaging_loop.py"
STEPS, TIMEOUT_S = 35, 1.5
SETTINGS: dict[str, Any] = {
    "replicas": 2,
    "ranks_per_replica": 2,
    "entry": str(SCRIPT),
    "train__micro_batch": 16,
    "ftar__timeout_s": TIMEOUT_S,
    "timeouts__connect_s": TIMEOUT_S,
}


@pytest.mark.proof
@pytest.mark.multiproc
def test_an_average_of_the_weights_is_equal_everywhere_and_an_evaluation_is_no_hang(tmp_path: Path) -> None:
    assert EVALUATION_S > TIMEOUT_S
    with Job(tmp_path, STEPS, **SETTINGS) as job:
        run = RunDir(job.run)
        job.until(run.lighthouse.exists, "the lighthouse listens")

        def pausing() -> list[str]:
            seen = status(run)
            shown = [row.get("pause", "") for row in seen["replicas"]]
            assert ("evaluation" in shown) == any("pauses: evaluation" in line for line in lines(run, seen))
            return shown

        # The pause of replica 1 is short, but may be seen.
        job.until(lambda: pausing() == ["evaluation", ""], "replica 1 waits for replica 0")
        job.until(lambda: job.step() > EVERY, "the step after the evaluation")
        assert job.contributing() == {0, 1}, "replica 1 waited"
        job.signal(1, 1, signal.SIGKILL)
        summary = job.end()
        check(summary, STEPS)
        assert [summary["replicas"][r]["incarnations"] for r in "01"] == [1, 2]
        held = [json.loads((job.run / f"held-{r}-{k}.json").read_text()) for r in (0, 1) for k in (0, 1)]
        assert len({each["average"] for each in held}) == 1, "the average differs"
        assert len({each["here"] for each in held}) == 1
        assert held[0]["average"] != held[0]["here"]
        assert [each["model"] for each in held] == [held[0]["here"], "", held[0]["here"], ""], (
            "rank 0 has the model"
        )
        assert [each["steps"] for each in held] == [STEPS] * 4
        for each in held[:2]:
            assert each["heard"] == [*range(1, STEPS + 1), each["heard"][-1]]
            assert isinstance(each["heard"][-1], str)
        for each in held[2:]:
            steps = [said for said in each["heard"] if isinstance(said, int)]
            assert steps == list(range(STEPS + 1 - len(steps), STEPS + 1)), (
                "no step of those that it applied is missing"
            )
            assert any(isinstance(said, list) for said in each["heard"]), "it came back with a state"
        logged = [row for r in (0, 1) for row in job.rows(f"replicas/{r}/logged.jsonl")]
        assert sorted(row["step"] for row in logged) == list(range(EVERY, STEPS + 1, EVERY)), "each value once"
        assert all(row["values"]["eval/loss"] > 0 for row in logged)
        assert [row["step"] for row in job.rows("metrics.jsonl") if "logged" in row] == list(
            range(EVERY, STEPS + 1, EVERY)
        )
        assert [row for row in job.rows("events.jsonl") if "has not entered" in str(row)] == []
