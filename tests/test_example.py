"""docs/examples/own_loop.py, as a user runs it."""

import json
import re
from pathlib import Path
from textwrap import dedent

import pytest

from ft_hsdp.launch.run.directory import RunDir, read_jsonl
from ft_hsdp.launch.run.verify import verify
from tests.support.framework_job import changed_lines
from tests.support.torchrun_job import ROOT, TorchrunJob, check

MARK = "# FT"
EXAMPLE = ROOT / "docs" / "examples" / "own_loop.py"
STEPS = 150
SETTINGS = f"""
replicas: 2
ranks_per_replica: 1
train: {{steps: {STEPS}, micro_batch: 16}}
optim: {{lr: 3.0e-3, clip: 1.0}}
"""


@pytest.mark.multiproc
def test_a_users_own_loop_survives_the_loss_of_a_rank(tmp_path: Path) -> None:
    with TorchrunJob(tmp_path, SETTINGS) as job:
        replicas = [job.torchrun(r, 1, EXAMPLE) for r in range(2)]
        job.until(lambda: job.step(0) >= 10, "step 10")
        job.kill(replicas[1], 0)
        finals = job.finals(replicas)
        check(finals, STEPS, ["0", "1"])
        rows = job.rows(0)
        assert [r["step"] for r in rows] == list(range(1, STEPS + 1)), "the survivor missed a step"
        assert [0] in [r["contributors"] for r in rows], "the survivor waited for the other one"
        assert rows[-1]["loss"] < 0.75 * rows[0]["loss"]
        job.until((job.run / "summary.json").exists, "the summary")
        summary = json.loads((job.run / "summary.json").read_text())
        assert (summary["steps"], summary["batches"]["duplicated"], summary["batches"]["skipped"]) == (STEPS, 0, 0)
        assert [r["step"] for r in read_jsonl(job.run / "metrics.jsonl")] == list(range(1, STEPS + 1))
        assert not verify(RunDir(job.run)).breaches


def test_ten_lines_of_a_plain_loop_change() -> None:
    """The page has the loop before and after; the example is the second one, with a mark at what is new."""
    page = (ROOT / "docs" / "library.md").read_text()
    before, after = (_code(page, f"## {title}") for title in ("Before", "After"))
    text = EXAMPLE.read_text()
    imports, _, loop = text.partition("def main() -> None:")
    body = loop[loop.index('"""\n') + 4 : loop.index("\n\nif __name__")]
    lines = [line for line in imports.splitlines() if line.endswith(MARK)] + dedent(body).splitlines()
    assert [line.removesuffix(MARK).rstrip() for line in lines if line] == after
    marked = [line.removesuffix(MARK).rstrip() for line in lines if line.endswith(MARK)]
    assert marked == [line for line in after if line not in before]
    assert len(marked) <= 10


@pytest.mark.parametrize(
    ("example", "script", "most"),
    [
        *((example, "", 10) for example in ("accelerate", "fabric", "ray_train", "torchtitan")),
        *(("transformers", script, 8) for script in ("", "sft_")),
    ],
)
def test_few_lines_change_for_a_trainer(example: str, script: str, most: int) -> None:
    assert 0 < changed_lines(example, f"{script}plain.py", f"{script}train.py") <= most


def _code(page: str, heading: str) -> list[str]:
    """The lines of the first block of Python below a heading."""
    found = re.search(r"```python\n(.*?)```", page[page.index(heading) :], re.DOTALL)
    assert found is not None
    return [line for line in found[1].splitlines() if line]
