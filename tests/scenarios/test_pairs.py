"""The plan and the report of the random pairs of faults."""

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from ft_hsdp.config import ChaosConfig
from ft_hsdp.config.chaos import Target
from ft_hsdp.launch.chaos import Injection
from tests.scenarios.pairs import Injured
from tests.support import os_faults
from tests.support.scenarios.pairs_plan import KINDS, Fault, pair
from tests.support.scenarios.scenario_job import ROOT, Job


def drawn(count: int) -> list[Fault]:
    pairs = [pair(3, number) for number in range(count)]
    return [fault for two in pairs for fault in (two.first, two.second)]


def test_every_kind_is_drawn_and_equal_seeds_draw_equal_pairs() -> None:
    faults = drawn(300)
    assert {fault.name for fault in faults} == set(KINDS)
    kinds = {*get_args(ChaosConfig.model_fields["kind"].annotation), *os_faults.KINDS}
    assert {fault.injection.kind for fault in faults} == kinds
    assert faults == drawn(300)
    assert pair(4, 0) != pair(3, 0)


# A slice of every kind of failure on purpose, in one real job; and random pairs of them.


STEPS = 38
RULES: list[dict[str, Any]] = [
    {"kind": "helper", "target": "agent", "replicas": [0], "signal": "STOP", "for_s": 0.3},
    {"kind": "partition", "edge": [0, "lighthouse"], "for_s": 0.3},
    {"kind": "helper", "target": "supervisor", "signal": "STOP", "for_s": 0.3},
    {"kind": "helper", "target": "lighthouse", "signal": "STOP", "for_s": 0.3},
    {"kind": "helper", "target": "fork_server", "signal": "STOP", "for_s": 0.3},
    {"kind": "signal", "replicas": [1], "signal": "STOP", "for_s": 0.3},
    {"kind": "partition", "edge": [0, 1], "for_s": 0.3, "reject": True},
    {"kind": "signal", "replicas": [2]},
    {"kind": "reset", "replicas": [0]},
    {"kind": "flip", "replicas": [1]},
]


OWN = [
    Fault("slow_disk", Injection(0, None, kind="slow_disk", for_s=0.3), 0.02),
    Fault("clock", Injection(1, None, kind="clock", for_s=0.5), -3600.0),
    Fault("descriptors", Injection(1, 0, kind="descriptors", for_s=0.3)),
    Fault("garbage", Injection(2, 0, kind="garbage", for_s=0.5)),
    Fault("disk_full", Injection(2, None, kind="disk_full", for_s=0.3)),
    Fault("memory", Injection(0, 0, kind="memory", for_s=0.3)),
]


def test_a_slice_of_every_kind(tmp_path: Path) -> None:
    """Each begins and ends, is told in words, and the job has one state and every batch once."""
    chaos = [{"at_step": 18 + 2 * n, **rule} for n, rule in enumerate(RULES)]
    preload = [os_faults.MODULE]
    with Job(tmp_path, STEPS, chaos=chaos, ranks_per_replica=1, debug__faults=True, preload=preload) as job:
        injured = Injured(job, STEPS)
        for n, fault in enumerate(OWN):
            job.until(lambda n=n: injured.watch.step >= 4 + 2 * n, "the next step")
            assert injured.hit(fault)[0] == ""
        job.ends_at(STEPS)
        injured.watch.close()
        injected, lifted = job.events("FailureInjected"), job.events("FailureLifted")
    kinds = {"signal" if e["kind"].startswith("SIG") else e["kind"] for e in injected}
    # A host takes its memory along. So soon before the loss of another replica that would be the end of the job;
    # test_lost_hosts.py has it.
    assert kinds == {*get_args(ChaosConfig.model_fields["kind"].annotation), *os_faults.KINDS} - {"host"}
    assert len(injected) == len(RULES) + len(OWN)
    assert {e["kind"] for e in lifted} == kinds - {"signal", "flip", "reset"} | {"SIGSTOP"}
    helpers = {e["target"] for e in injected if e["kind"] == "helper"}
    assert len(helpers) == len(get_args(Target)), "each kind of helper"


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
