import shutil
import signal
from pathlib import Path

import pytest

from ft_hsdp.launch.injection import inflict, parse_options
from ft_hsdp.launch.run.directory import RunDir
from tests.scenarios.test_spares import starts
from tests.support.aborted import aborted
from tests.support.scenarios.scenario_job import ROOT, Job, check
from tests.support.slow_script import write_slow_script

EXAMPLE = ROOT / "docs" / "examples" / "own_loop.py"
TWO = {"replicas": 2, "train__micro_batch": 16, "optim__lr": 3e-3}


def test_a_function_trains(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "mine.py")
    settings = {**TWO, "ranks_per_replica": 1, "args": ["x"], "preload": ["colorsys"]}
    with Job(tmp_path, 8, entry="mine:main", **settings) as job:
        check(job.end(), 8)
        assert not (job.run.parent / ".cache").exists(), "the data of the built-in trainer were prepared"


@pytest.mark.proof
def test_a_users_own_model_is_trained_by_fewer_ranks_of_one_replica_for_a_while(tmp_path: Path) -> None:
    """A replica of one rank and one of two sum the model's rows in lanes; both end with the same bits."""
    write_slow_script(tmp_path / "mine.py", tmp_path / "hurry", 0.15)
    shrinks = {
        "hosts__per_replica": 2,
        "memory__shrink_to": 1,
        "timeouts__place_s": 0.3,
        "quorum__min_replicas": 2,
    }
    with Job(tmp_path, 60, entry="mine.py", **shrinks, **TWO, quorum__on_lost_head="rollback") as job:
        job.until(lambda: job.step() >= 5, "step 5")
        lost = inflict(RunDir(job.run), parse_options(kind="host", replica=0, host="r0h1"))
        job.until(lambda: len(narrow(job)) >= 3, "unequal replicas commit steps together")
        lost.lifted("it is back")
        job.until(lambda: job.events("Grown"), "it begins to grow")
        job.until(lambda: job.step() > narrow(job)[-1], "all ranks train")
        job.hurry()
        check(job.end(), 60)
        assert [(e["event"], e["from"], e["to"]) for e in job.events("Shrunk") + job.events("Grown")] == [
            ("Shrunk", 2, 1),
            ("Grown", 1, 2),
        ]
        assert job.rows("metrics.jsonl")[-1]["step"] not in narrow(job)


def narrow(job: Job) -> list[int]:
    """The steps that replica 1 has committed together with one of fewer ranks."""
    rows = job.rows("replicas/1/commits.jsonl")
    return [r["step"] for r in rows if r.get("ring_widths") == [1, 2] and r["contributors"] == [0, 1]]


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
        check(job.end(), 130)
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
