"""A slice of every kind of failure on purpose, in one real job; and random pairs of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from ft_hsdp.config import ChaosConfig
from ft_hsdp.config.chaos import Target
from ft_hsdp.sentences import tell
from tests.support.scenarios.scenario_job import ROOT, Job, check

pytestmark = pytest.mark.multiproc

STEPS = 38
RULES: list[dict[str, Any]] = [
    {"kind": "slow_disk", "replicas": [0], "for_s": 0.3, "delay_s": 0.02},
    {"kind": "clock", "replicas": [1], "for_s": 0.5, "by_s": -3600},
    {"kind": "descriptors", "replicas": [1], "for_s": 0.3},
    {"kind": "garbage", "replicas": [2], "for_s": 0.5},
    {"kind": "helper", "target": "agent", "replicas": [0], "signal": "STOP", "for_s": 0.3},
    {"kind": "partition", "edge": [0, "lighthouse"], "for_s": 0.3},
    {"kind": "helper", "target": "supervisor", "signal": "STOP", "for_s": 0.3},
    {"kind": "helper", "target": "lighthouse", "signal": "STOP", "for_s": 0.3},
    {"kind": "helper", "target": "fork_server", "signal": "STOP", "for_s": 0.3},
    {"kind": "signal", "replicas": [1], "signal": "STOP", "for_s": 0.3},
    {"kind": "disk_full", "replicas": [2], "for_s": 0.3},
    {"kind": "memory", "replicas": [0], "for_s": 0.3},
    {"kind": "partition", "edge": [0, 1], "for_s": 0.3, "reject": True},
    {"kind": "signal", "replicas": [2]},
    {"kind": "flip", "replicas": [1]},
]


def test_a_slice_of_every_kind(tmp_path: Path) -> None:
    """Each begins and ends, is told in words, and the job has one state and every batch once."""
    chaos = [{"at_step": 4 + 2 * n, **rule} for n, rule in enumerate(RULES)]
    with Job(tmp_path, STEPS, chaos=chaos, ranks_per_replica=1) as job:
        check(job.end(), STEPS)
        injected, lifted = job.events("FailureInjected"), job.events("FailureLifted")
    kinds = {"signal" if e["kind"].startswith("SIG") else e["kind"] for e in injected}
    assert kinds == set(get_args(ChaosConfig.model_fields["kind"].annotation))
    assert len(injected) == len(RULES)
    assert {e["kind"] for e in lifted} == kinds - {"signal", "flip"} | {"SIGSTOP"}
    helpers = {e["target"] for e in injected if e["kind"] == "helper"}
    assert len(helpers) == len(get_args(Target)), "each kind of helper"
    told = "\n".join(map(tell, injected))
    assert "the disk of replica 2 is full for 0.3 s" in told
    assert "nothing passes between replica 0 and the lighthouse" in told
    assert "SIGKILL sent to replica 2 rank 0" in told


@pytest.mark.soak
def test_random_pairs(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    command = [sys.executable, str(ROOT / "tests/scenarios/pairs.py"), "--pairs", "4", "--seed", "7"]
    done = subprocess.run(
        [*command, "--report", str(report), "--keep", str(tmp_path / "breaches")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 pairs of faults" in done.stdout
