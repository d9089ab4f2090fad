"""Jobs with several optimizers and torch's schedulers, of which a rank is killed, or all processes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.launch import muon_loop
from tests.support.scenarios.scenario_job import ROOT, Job, check

STEPS = 100  # they must last until the replica is back, on a slow machine, too; then they take no time
LOOP = ROOT / "tests" / "support" / "launch" / "muon_loop.py"
SETTINGS: dict[str, Any] = {
    "replicas": 2,
    "ranks_per_replica": 2,
    "train__micro_batch": 16,
    "lr__intervention": "none",
}


def planned() -> tuple[list[float], list[list[float]]]:
    """Muon's rate in each step of a plain loop of torch, and all rates after the last one."""
    matrix, other = nn.Parameter(torch.ones(2, 2)), [nn.Parameter(torch.ones(1)) for _ in range(2)]
    muon = torch.optim.Muon([matrix], lr=muon_loop.RATES[0])
    groups: list[dict[str, Any]] = [{"params": other[0]}, {"params": other[1], "lr": 1e-3}]
    adam = torch.optim.AdamW(groups, lr=muon_loop.RATES[1])
    schedulers = muon_loop.schedules(muon, adam)
    used = []
    for _ in range(STEPS):
        used.append(muon.param_groups[0]["lr"])
        for each in (muon, adam):
            each.step()
        for scheduler in schedulers:
            scheduler.step()
    return used, [s.get_last_lr() for s in schedulers]  # type: ignore[misc]


@pytest.mark.multiproc
@pytest.mark.proof
def test_two_optimizers_and_their_schedules_survive_the_loss_of_a_rank(tmp_path: Path) -> None:
    with Job(tmp_path, STEPS, entry=str(LOOP), args=[str(tmp_path)], **SETTINGS) as job:
        job.until(lambda: job.step() >= 15, "step 15")
        job.signal(1, 1, signal.SIGKILL)
        job.until(lambda: job.events("Rejoined", replica=1), "the replica is back")
        job.hurry()
        summary = job.end()
        check(summary, STEPS)
        assert [summary["replicas"][r]["incarnations"] for r in "01"] == [1, 2]
        used, after = planned()
        logs = [job.rows(f"replicas/{replica}/commits.jsonl") for replica in (0, 1)]
        for rows in logs:
            assert [row["lr"] for row in rows] == [used[row["step"] - 1] for row in rows]
        assert [1] not in [row["contributors"] for row in logs[0]]
        assert [0, 1] in [row["contributors"] for row in logs[1][-5:]], "the replica never came back"
        files = sorted(tmp_path.glob("[01]-[01].json"))
        assert len(files) == 4
        for file in files:
            assert json.loads(file.read_text()) == {"epochs": [STEPS, STEPS], "rates": after}, file.name


NARROW = {"ranks_per_replica": 1, "train__accumulate": 2}  # one rank trains what two had


@pytest.mark.multiproc
@pytest.mark.proof
@pytest.mark.parametrize(
    ("wanted", "width"), [(["--many"], {}), (["--many", "--exact"], NARROW)], ids=["same width", "other width"]
)
def test_a_killed_job_that_is_resumed_ends_as_one_that_never_stopped(tmp_path, wanted, width) -> None:
    """Muon, AdamW, Adam and SGD; plateau, exponential, cosine and one-cycle schedules, and a rate set by hand."""
    steps, kept, ends = 12, tmp_path / "kept", []
    for name in ("whole", "killed", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        if name != "killed":
            (folder / "hurry").touch()
        own = {"entry": str(LOOP), "args": [str(folder), *wanted], "quorum__min_replicas": 2}
        own |= {"checkpoint__every": 4, "checkpoint__dir": str(folder if name == "whole" else kept)}
        with Job(folder, steps, **{**SETTINGS, **own, **(width if name == "resumed" else {})}) as job:
            if name == "killed":
                job.until(lambda: list(kept.glob("step-4-*")), "a checkpoint")
                job.until(lambda: job.step() >= 6, "step 6")
                job.process.kill()
                continue
            summary = job.end()
            check(summary, steps)
            assert not job.events("SettingChanged")
            (digest,) = {replica["digest"] for replica in summary["replicas"].values()}
            seen = json.loads((folder / "0-0.json").read_text())
            ends.append((digest, seen, [row["lr"] for row in job.rows("replicas/0/commits.jsonl")][-4:]))
    assert 4 < job.rows("replicas/0/commits.jsonl")[0]["step"] <= steps - 4, "it was not resumed midway"
    assert ends[0] == ends[1]
