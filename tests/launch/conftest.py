from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import Plan

from ft_hsdp.config import dump, parse
from ft_hsdp.launch.run.directory import RunDir


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts find the stand-ins beside it."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "job")
    run.path.mkdir(parents=True)
    run.config.write_text(dump(parse({"job": {"name": "job", "runs_dir": str(tmp_path / "runs")}})))
    return run


@pytest.fixture
def plan(run_dir: RunDir) -> Plan:
    """Say what the stand-in ranks do: {replica: {restart: {rank: action}}}."""

    def write(actions: dict[str, Any]) -> None:
        (run_dir.path / "plan.json").write_text(json.dumps(actions))

    return write
