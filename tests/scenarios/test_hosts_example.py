"""The commands of docs/memory.md around configs/hosts.yaml, word for word: a spare host replaces a lost one."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import ROOT, Job, check
from tests.support.started_job import StartedJob

STEPS, AT = 40, 20
PAGE = (ROOT / "docs/memory.md").read_text()
COMMANDS = re.findall(
    r"^python launcher.py ([^#\n]*)", re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[0], re.MULTILINE
)


class Example(Job):
    """The job that the page has a user start, with its folder of runs elsewhere."""

    def __init__(self, folder: Path) -> None:
        words = shlex.split(COMMANDS[1])
        command = [sys.executable, str(ROOT / "launcher.py"), *words, f"--job.runs_dir={folder / 'runs'}"]
        command[3] = str(ROOT / words[1])
        StartedJob.__init__(self, command, folder, folder / "runs" / "hosts", folder / "up.log")


def test_the_page_shows_the_commands() -> None:
    assert [" ".join(command.split()) for command in COMMANDS] == [
        "plan configs/hosts.yaml",
        "up configs/hosts.yaml",
        "explain hosts",
        "replay hosts",
    ]


@pytest.mark.proof
def test_the_spare_host_goes_on_from_the_copies_of_the_other_one(tmp_path: Path) -> None:
    with Example(tmp_path) as job:
        summary = job.end()
        check(summary, STEPS)
        (recovery,) = summary["recoveries"]
        assert recovery["rung"] == "copy"
        assert set(recovery["from"].values()) == {"r0h0"}
        assert recovery["lost_steps"] <= 1
        assert summary["batches"]["duplicated"] == summary["batches"]["skipped"] == 0
        names = [row["event"] for row in job.rows("events.jsonl")]
        assert names.index("Protected") < names.index("HostReplaced") < names.index("StateRestored")
        assert job.replayed()["equal"]
