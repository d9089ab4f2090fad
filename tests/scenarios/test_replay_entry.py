import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ft_hsdp.errors import EXIT_CONFIG
from tests.scenarios.test_shrink import SAFE, beside, shrunk, together, widths
from tests.scenarios.test_units import AT, GLOBAL, SAME_STEP, kill
from tests.support.running import run_by
from tests.support.scenarios.scenario_job import ROOT, Job
from tests.support.slow_script import LOSS, write_slow_script

EXAMPLE = ROOT / "docs" / "examples" / "own_loop.py"
MUON = ROOT / "tests" / "support" / "launch" / "muon_loop.py"  # other bits on another number of ranks


def refusal(job: Job) -> list[str]:
    """The lines of a replay that is refused."""
    refused = subprocess.run(job.replay_command(), capture_output=True, text=True, timeout=120)
    assert refused.returncode == EXIT_CONFIG
    return refused.stderr.splitlines()


@pytest.mark.proof
def test_a_script_is_repeated_bit_for_bit_through_a_loss_and_a_refill(tmp_path: Path) -> None:
    """The survivors train units of the lost one in the same step, so their step has a second part."""
    script = tmp_path / "train.py"
    shutil.copy(EXAMPLE, script)
    points = kill("micro-batch", 1, rank=1)
    settings = {**SAME_STEP, **GLOBAL, "train__accumulate": 2, "entry": str(script)}
    with Job(tmp_path, 12, **settings, debug__failpoints=points) as job:
        job.ends_well(12)
        rows = job.rows("replicas/0/commits.jsonl")
        assert {c["part"] for c in rows[AT - 1]["contributions"]} == {0, 1}
        for replica in (0, 2):  # another rate at step AT + 1
            file = job.run / "replicas" / str(replica) / "commits.jsonl"
            lines = job.rows(f"replicas/{replica}/commits.jsonl")
            lines[AT]["lr_scale"] *= 0.5
            file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        verdict = job.replayed()
        assert not verdict["equal"]
        assert verdict["differs_at"] == AT + 2, "the rate shows in the sums of the step after it"
        script.write_text(script.read_text().replace("0.1 * torch.randn", "0.2 * torch.randn"))
        assert "entry" in refusal(job)[-1]


@pytest.mark.soak
def test_a_run_that_was_resumed_is_repeated_from_its_checkpoint(tmp_path: Path) -> None:
    """The second run has another number of ranks, a loss, and the optimizer's state of the checkpoint."""
    script, checkpoints = tmp_path / "train.py", tmp_path / "checkpoints"
    shutil.copy(EXAMPLE, script)
    settings = {"replicas": 2, "entry": str(script), "checkpoint__dir": str(checkpoints), "checkpoint__keep": 9}
    settings["checkpoint__every"] = 6
    with Job(tmp_path / "one", 6, **settings, ranks_per_replica=1, train__accumulate=2) as job:
        job.ends_at(6)
    with Job(
        tmp_path / "two", 18, **settings, ranks_per_replica=2, chaos=[{"at_step": 10, "replicas": [1]}]
    ) as job:
        job.ends_well(18)
        assert job.rows("metrics.jsonl")[0]["step"] == 7
        for path in checkpoints.glob("step-6-*"):
            shutil.rmtree(path)
        (line,) = refusal(job)
        assert "step 6" in line


@pytest.mark.soak
def test_a_replica_that_shrank_and_grew_is_repeated_by_as_many_ranks_as_it_had(tmp_path: Path) -> None:
    """Rates of torch's schedulers and the state of the optimizers go from ranks to ranks, as in the run."""
    hosts = {"ranks_per_replica": 2, "hosts.per_replica": 2, "memory.shrink_to": 1}
    with Job(tmp_path, 24, replicas=1, **hosts, **SAFE, entry=str(MUON), args=[str(tmp_path)]) as job:
        job.until(lambda: job.step() >= 4 and job.events("Protected"), "copies on both hosts")
        lost = job.lose_host(0, "r0h1")
        job.until(lambda: job.events("Shrunk"), "one rank")
        job.more(3)
        lost.lifted("it is back")
        job.until(lambda: job.events("Grown"), "both ranks")
        job.hurry()
        job.ends_at(24)
        assert [ranks for ranks, _ in widths(job)] == [0, 1, 0]
        for seen in tmp_path.glob("0-*.json"):
            seen.unlink()
        job.replays(24)
        assert len(list(tmp_path.glob("0-*.json"))) == 2, "what follows the loop is done at its end"


@pytest.mark.soak
def test_replicas_of_unequal_width_are_repeated_by_ranks_of_each_width(tmp_path: Path) -> None:
    """Both sum in lanes, as in the run. If the ranks of one width fail, those of the other one end, too."""
    script, fails, steps = tmp_path / "train.py", tmp_path / "fails", 40
    write_slow_script(script, tmp_path / "hurry", 0.1)
    fault = f"if job.ranks == 1 and __import__('os').path.exists({str(fails)!r}): raise OSError('no such data')"
    script.write_text(script.read_text().replace(LOSS, f"{fault}\n        {LOSS}"))
    with beside(tmp_path, steps, 2, **{"quorum.min_replicas": 2, "entry": str(script)}) as job:
        shrunk(job).lifted("it is back")
        job.until(lambda: job.events("Grown"), "both ranks")
        job.hurry()
        job.ends_well(steps)
        assert (1, 2) in together(job)
        fails.touch()
        assert "OSError: no such data" in refusal(job)[-1]
        assert not run_by(str(job.run))
