import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.scenarios.test_spares import starts
from tests.support.aborted import aborted
from tests.support.scenarios.scenario_job import ROOT, Job

EXAMPLE = ROOT / "docs" / "examples" / "own_loop.py"
TWO = {"replicas": 2, "train__micro_batch": 16, "optim__lr": 3e-3}


def test_a_function_trains(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    settings = {**TWO, "ranks_per_replica": 1, "args": ["x"], "preload": ["colorsys"]}
    with Job(tmp_path, 8, entry="mine:main", **settings) as job:
        job.ends_at(8)
        assert not (job.run.parent / ".cache").exists(), "the data of the built-in trainer were prepared"


def test_a_replica_with_one_sample_less_does_not_train(tmp_path: Path) -> None:
    script, rows = tmp_path / "mine.py", "torch.zeros(n := 160 - job.replica, 2), torch.zeros(n, dtype=torch.long)"
    data = f"data = job.loader(torch.utils.data.TensorDataset({rows}), 2)"
    script.write_text(EXAMPLE.read_text().replace("data = Spirals()", data))
    with Job(tmp_path, 4, entry="mine.py", **{**TWO, "ranks_per_replica": 1}) as job:
        job.end(64)
        assert "data: length is" in job.tail()
        assert {"159", "160"} <= set(re.findall(r"\d+", job.tail()))
        assert job.rows("metrics.jsonl") == []


@pytest.mark.proof
def test_sigterm_means_leave_and_an_edited_script_is_not_run_until_it_is_put_back(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    shutil.copy(EXAMPLE, script)
    whole = script.read_text()
    with Job(tmp_path, 130, entry="mine.py", restart__budget=1, **TWO) as job:
        job.until(lambda: job.step() >= 5, "step 5")
        script.write_text(f"{whole}\n# edited\n")
        job.signal(1, 1, signal.SIGTERM)
        job.until(lambda: len(job.events("ProcessExited", replica=1, kind="exit 64")) > 2, "three refusals")
        script.write_text(whole)
        job.ends_at(130)
        exits = job.events("ProcessExited", replica=1)
        assert exits[0]["kind"] in ("exit 143", "exit 0"), "it left"
        assert aborted(job.rows("events.jsonl")) == [], "no step was repeated"
        refused = [e["reason"] for e in exits if e["kind"] == "exit 64"]
        assert "allowed: mine.py" in refused[0]
        (told, _) = job.events("StartPrevented", replica=1)
        assert (told["replica"], told["cause"]) == (1, "changed")
        assert job.events("StartPrevented", replica=1, over=True)
        assert job.log.read_text().count("cannot be started now") == 1, "the console says it once a minute"


@pytest.mark.proof
def test_a_step_that_ends_all_replicas_three_times_ends_the_job_with_a_reason(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    trains = "        loss = model(batch)\n"
    fails = "        if job.step >= 5:\n            raise RuntimeError('unreadable')\n"
    script.write_text(EXAMPLE.read_text().replace(trains, fails + trains))
    with Job(tmp_path, 20, entry="mine.py", **{**TWO, "ranks_per_replica": 1}) as job:
        summary = job.end(75)
        assert summary["steps"] == 5
        (given_up,) = job.events("JobGivenUp")
        assert given_up["step"] == 6
        assert "RuntimeError: unreadable" in given_up["reason"]
        assert all(3 <= len(starts(job, replica)) <= 4 for replica in (0, 1))


FATAL_SAMPLE = """
from torch.utils.data import Dataset

class Fatal(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, sample):
        if sample in (32, 33):
            raise ValueError(f"sample {sample} is odd")
        return torch.full((2,), sample / 4096), torch.tensor(sample % 3)

"""


@pytest.mark.proof
def test_a_unit_that_ends_its_process_again_is_left_out_with_its_samples(tmp_path: Path) -> None:
    """Like one whose gradient is not finite: no weight changes if it is all that the step has."""
    script, whole = tmp_path / "mine.py", EXAMPLE.read_text()
    whole = whole.replace("def main()", f"{FATAL_SAMPLE}\ndef main()")
    script.write_text(whole.replace("data = Spirals()", "data = job.loader(Fatal(), 16, shuffle=False)"))
    with Job(tmp_path, 8, entry="mine.py", replicas=1, ranks_per_replica=1) as job:
        summary = job.end()
        assert len(starts(job, 0)) == 3, "the same batch has ended it twice"
        assert summary["steps"] == 8
        assert [e["step"] for e in job.rows("replicas/0/events.jsonl") if e["event"] == "StepSkipped"] == [3]
        (blamed,) = job.events("BatchBlamed")
        assert (blamed["shard"], blamed["index"], blamed["units"]) == (0, 2, 1)
        assert "sample 32 is odd" in blamed["reason"]
        (left_out,) = [e for e in job.rows("replicas/0/events.jsonl") if e["event"] == "BatchLeftOut"]
        assert (left_out["step"], "samples are 32, 33, 34" in left_out["reason"]) == (3, True)
        assert "sample 32 is odd" in job.log.read_text()
