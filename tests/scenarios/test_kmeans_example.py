"""The commands of docs/blocks.md around examples/kmeans, word for word: a lost host changes no bit."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scenarios.scenario_job import ROOT, Job, check
from tests.support.started_job import StartedJob

STEPS, POINTS = 24, 65536
FEWER = ("--hosts.spare=0", "--memory.shrink_to=2", "--timeouts.place_s=0.3")  # instead of a spare host
PAGE = (ROOT / "docs/blocks.md").read_text()
COMMANDS = re.findall(r"^python ([^#\n]*)", re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[0], re.MULTILINE)


class Example(Job):
    """The job that the page has a user start, with its folders elsewhere."""

    def __init__(self, folder: Path, *more: str) -> None:
        words = shlex.split(COMMANDS[1])
        command = [
            sys.executable,
            *(str(ROOT / word) if "/" in word or word.endswith(".py") else word for word in words),
        ]
        here = [f"--job.runs_dir={folder / 'runs'}", f'--args=["{folder.parent / "points.bin"}"]']
        folder.mkdir()
        entry = f"--entry={ROOT / 'examples/kmeans/train.py'}"
        StartedJob.__init__(
            self, [*command, *here, entry, *more], folder, folder / "runs" / "kmeans", folder / "up.log"
        )


def test_the_page_shows_the_commands() -> None:
    assert [" ".join(command.split()) for command in COMMANDS] == [
        "examples/kmeans/points.py runs/points.bin",
        "launcher.py up examples/kmeans/config.yaml",
        "launcher.py explain kmeans",
        "launcher.py replay kmeans",
    ]


@pytest.mark.proof
def test_a_lost_host_costs_no_point_and_changes_no_bit(tmp_path: Path) -> None:
    points = [sys.executable, str(ROOT / shlex.split(COMMANDS[0])[0]), str(tmp_path / "points.bin")]
    subprocess.run(points, check=True, timeout=60)
    digests = []
    for name, more in (("lost", ()), ("fewer", FEWER)):
        with Example(tmp_path / name, *more) as job:
            summary = job.end()
            check(summary, STEPS)
            digests.append(summary["replicas"]["0"]["digest"])
            told = job.events("BlocksSubmitted")
            assert job.events("BlocksRead") == []
            assert f"{POINTS} blocks were read" in told[0]["reason"]
            replayed = job.replayed()
            assert replayed["equal"], replayed
            digests.append(replayed["digest"])  # in processes that lose nothing
            if not more:
                assert [row["copies"] for row in told] == [2, 2]
                assert "0 blocks were read" in told[1]["reason"], "the other host had all points"
            if name == "fewer":
                assert [row["to"] for row in job.events("Shrunk")] == [2]
                assert ["wanted" in row for row in told] == [False, True], "the host that is left had all points"
    assert digests == [digests[-1]] * 4
    assert summary["loss_last"] < 0.9 * summary["loss_first"]
