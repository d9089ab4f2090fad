"""The commands of docs/elastic.md around configs/shrink.yaml, word for word: fewer ranks for a while."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.status import lines, status
from tests.support.aborted import aborted
from tests.support.scenarios.scenario_job import ROOT, Job, check
from tests.support.started_job import StartedJob

STEPS = 200
PAGE = (ROOT / "docs/elastic.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(BLOCK,) = (block for block in BLOCKS if "up configs/shrink.yaml" in block)
COMMANDS = dict(re.findall(r"^(python launcher.py [^#\n]*?) +# (.*)$", BLOCK, re.MULTILINE))
UP, EXPLAIN = "python launcher.py up configs/shrink.yaml", "python launcher.py explain shrink"


def words(command: str) -> list[str]:
    """What a shell makes of a command of the page."""
    return [sys.executable, *shlex.split(command)[1:]]


class Example(Job):
    """The job that the page has a user start, in a folder that has the launcher and the configurations."""

    def __init__(self, folder: Path) -> None:
        for name in ("launcher.py", "configs"):
            (folder / name).symlink_to(ROOT / name)
        StartedJob.__init__(self, words(UP), folder, folder / "runs" / "shrink", folder / "up.log")


def test_the_page_shows_the_commands() -> None:
    assert list(COMMANDS) == [UP, EXPLAIN]


@pytest.mark.proof
def test_a_replica_goes_on_with_two_of_four_ranks_and_grows(tmp_path: Path) -> None:
    with Example(tmp_path) as job:
        run = RunDir(job.run)
        job.until(lambda: job.events("Shrunk"), "fewer ranks")
        job.until(lambda: any("  2 of 4 ranks" in line for line in lines(run, status(run))), "`status` says so")
        summary = job.end(deadline_s=200.0)
        check(summary, STEPS)
        (shrunk,), (grown,) = job.events("Shrunk"), job.events("Grown")
        assert [(e["replica"], e["from"], e["to"]) for e in (shrunk, grown)] == [(0, 4, 2), (0, 2, 4)]
        assert [failure["kind"] for failure in summary["failures"]] == ["host"]
        assert [row["step"] for row in job.rows("metrics.jsonl")] == list(range(1, STEPS + 1))
        assert not aborted([e for e in job.rows("events.jsonl") if e["t"] > shrunk["t"]]), "no step is repeated"
        assert {recovery["lost_steps"] for recovery in summary["recoveries"]} <= {0}
        assert sum(summary["narrow_steps"].values()) >= 1
        told = subprocess.run(words(EXPLAIN), cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert told.returncode == 0
        assert COMMANDS[EXPLAIN].strip('"') in told.stdout
