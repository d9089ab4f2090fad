"""The bench of a step on a GPU, on a CPU: that it runs, not how fast."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.kernels import gpu_step


@pytest.mark.proof
@pytest.mark.multiproc
def test_both_train_and_each_part_is_timed_and_a_step_profiled(tmp_path: Path) -> None:
    found = gpu_step.run("cpu", width=32, layers=1, tokens=8, trace=tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz") as trace:
        assert any("backward" in str(event.get("name")) for event in json.load(trace)["traceEvents"])
    assert found["ok"], found
    for who in ("plain", "ours"):
        assert {"forward", "backward", "optimizer", "waits"} <= found[who].keys()
    assert found["step_s"] > 0
