import json
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.config import dump, parse
from ft_hsdp.launch.run.directory import RunDir
from tests.support.launch.launch_helpers import Plan


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
