"""A job with two optimizers and torch's schedulers, of which a rank is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.launch import muon_loop
from tests.support.torchrun_job import ROOT, TorchrunJob, check

STEPS = 160
LOOP = ROOT / "tests" / "support" / "launch" / "muon_loop.py"
SETTINGS = f"""
replicas: 2
ranks_per_replica: 2
train: {{steps: {STEPS}, micro_batch: 16}}
lr: {{intervention: none}}
"""


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
    with TorchrunJob(tmp_path, SETTINGS) as job:
        replicas = [job.torchrun(r, 2, LOOP, "CONFIG", str(tmp_path), "--replica", "REPLICA") for r in range(2)]
        job.until(lambda: job.step(0) >= 15, "step 15")
        job.kill(replicas[1], 1)
        check(job.finals(replicas), STEPS, ["0", "1"])
        used, after = planned()
        for replica in range(2):
            rows = job.rows(replica)
            assert [row["lr"] for row in rows] == [used[row["step"] - 1] for row in rows]
        assert [1] not in [row["contributors"] for row in job.rows(0)]
        assert [0, 1] in [row["contributors"] for row in job.rows(1)[-5:]], "the replica never came back"
        for file in sorted(tmp_path.glob("[01]-[01].json")):
            seen = json.loads(file.read_text())
            assert seen == {"epochs": [STEPS, STEPS], "rates": after}, file.name
