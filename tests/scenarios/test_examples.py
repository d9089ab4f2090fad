"""The configurations that the docs have a user run, by the commands of their pages, word for word."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ft_hsdp.config import load
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.status import lines, status
from tests.support.aborted import aborted
from tests.support.scenarios.scenario_job import ROOT, Job
from tests.support.started_job import StartedJob

SHOWN = {
    ("blocks", "examples/kmeans/config.yaml"): [
        "python examples/kmeans/points.py runs/points.bin",
        "python launcher.py up examples/kmeans/config.yaml",
        "python launcher.py explain kmeans",
        "python launcher.py replay kmeans",
    ],
    ("memory", "configs/hosts.yaml"): [
        *(f"python launcher.py {command} configs/hosts.yaml" for command in ("plan", "up")),
        *(f"python launcher.py {command} hosts" for command in ("explain", "replay")),
    ],
    ("elastic", "configs/shrink.yaml"): [
        "python launcher.py up configs/shrink.yaml",
        "python launcher.py explain shrink",
    ],
    ("hosts", "configs/machines.yaml"): [
        "python launcher.py lighthouse configs/machines.yaml --url http://10.0.0.1:29500",
        "python launcher.py host configs/machines.yaml --lighthouse http://10.0.0.1:29500",
        "python launcher.py status",
        "python launcher.py explain machines",
        "python launcher.py lighthouse configs/machines.yaml &",
    ],
}


def commands(page: str, config: str) -> dict[str, str]:
    """The commands around a configuration, with what the page says of each."""
    text = (ROOT / f"docs/{page}.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    block = next((block for block in blocks if f" up {config}" in block), "".join(blocks))
    found = re.findall(r"^(python [^#\n]*?) *(?:# (.*))?$", block, re.MULTILINE)
    return {" ".join(command.split()): said for command, said in found}


@pytest.mark.parametrize("at", SHOWN)
def test_the_page_shows_the_commands(at: tuple[str, str]) -> None:
    assert list(commands(*at)) == SHOWN[at]
    load(ROOT / at[1])


class Example(Job):
    """The job of such a configuration, in a folder that has the launcher and what the commands name."""

    def __init__(self, folder: Path, config: str, *more: str) -> None:
        folder.mkdir(exist_ok=True)
        for name in ("launcher.py", "configs", "examples"):
            (folder / name).symlink_to(ROOT / name)
        up = [sys.executable, "launcher.py", "up", config, *more]
        run = folder / "runs" / load(ROOT / config).job.name
        StartedJob.__init__(self, up, folder, run, folder / "up.log")


FEWER = ("--hosts.spare=0", "--memory.shrink_to=2", "--timeouts.place_s=0.3")  # instead of a spare host


@pytest.mark.proof
def test_a_lost_host_costs_no_point_and_changes_no_bit(tmp_path: Path) -> None:
    file, script = tmp_path / "points.bin", ROOT / "examples/kmeans/train.py"
    subprocess.run([sys.executable, str(ROOT / "examples/kmeans/points.py"), str(file)], check=True, timeout=60)
    digests = []
    for name, more in (("lost", ()), ("fewer", FEWER)):
        here = (f"--entry={script}", f'--args=["{file}"]', *more)
        with Example(tmp_path / name, "examples/kmeans/config.yaml", *here) as job:
            summary = job.ends_at(24)
            digests.append(summary["replicas"]["0"]["digest"])
            told = job.events("BlocksSubmitted")
            assert job.events("BlocksRead") == []
            assert "65536 blocks were read" in told[0]["reason"]
            digests.append(job.replays(24))  # in processes that lose nothing
            if not more:
                assert [row["copies"] for row in told] == [2, 2]
                assert "0 blocks were read" in told[1]["reason"], "the other host had all points"
            else:
                assert [row["to"] for row in job.events("Shrunk")] == [2]
                assert ["wanted" in row for row in told] == [False, True], "the host that is left had all points"
    assert digests == [digests[-1]] * 4
    assert summary["loss_last"] < 0.9 * summary["loss_first"]


@pytest.mark.proof
def test_the_spare_host_goes_on_from_the_copies_of_the_other_one(tmp_path: Path) -> None:
    with Example(tmp_path, "configs/hosts.yaml") as job:
        summary = job.ends_well(40)
        (recovery,) = summary["recoveries"]
        assert recovery["rung"] == "copy"
        assert set(recovery["from"].values()) == {"r0h0"}
        assert recovery["lost_steps"] <= 1
        names = [row["event"] for row in job.rows("events.jsonl")]
        assert names.index("Protected") < names.index("HostReplaced") < names.index("StateRestored")


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_replica_goes_on_with_two_of_four_ranks_and_grows(tmp_path: Path) -> None:
    steps = 200
    with Example(tmp_path, "configs/shrink.yaml", "--timeouts.evict_s=5") as job:  # its host is away for 8 s
        run = RunDir(job.run)
        job.until(lambda: job.events("Shrunk"), "fewer ranks")
        job.until(lambda: any("  2 of 4 ranks" in line for line in lines(run, status(run))), "`status` says so")
        summary = job.ends_at(steps)
        (shrunk,), (grown,) = job.events("Shrunk"), job.events("Grown")
        assert [(e["replica"], e["from"], e["to"]) for e in (shrunk, grown)] == [(0, 4, 2), (0, 2, 4)]
        assert [failure["kind"] for failure in summary["failures"]] == ["host"]
        assert [row["step"] for row in job.rows("metrics.jsonl")] == list(range(1, steps + 1))
        assert not aborted([e for e in job.rows("events.jsonl") if e["t"] > shrunk["t"]]), "no step is repeated"
        assert {recovery["lost_steps"] for recovery in summary["recoveries"]} <= {0}
        assert sum(summary["narrow_steps"].values()) >= 1
        (_, (explain, line)) = commands("elastic", "configs/shrink.yaml").items()
        words = [sys.executable, *shlex.split(explain)[1:]]
        told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert told.returncode == 0
        assert line.strip('"') in told.stdout
