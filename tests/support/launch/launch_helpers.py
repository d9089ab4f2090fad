"""Waiting in tests: always for a condition, always with a deadline; and whole jobs of trainers that are given."""

import asyncio
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ft_hsdp.config import parse
from ft_hsdp.launch.job import JobRun, start_run
from ft_hsdp.launch.local import LocalReplicas, prepare_data
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.launch.run.terminal import Terminal

DEADLINE_S = 40.0

Plan = Callable[[dict[str, Any]], None]


def train(folder: Path, entry: str, deadline_s: float = 120.0, code: int = 0, **settings: Any) -> RunDir:
    """Run a job of trainers whose entry is given, until it has ended with ``code``; its run directory."""
    data = {"max_bytes": 200_000, **settings.pop("data", {})}
    config = parse({"job": {"name": "job", "runs_dir": str(folder)}, "data": data, **settings})
    prepare_data(config)
    run = start_run(config)
    with Terminal(config, io.StringIO()) as terminal:
        job = JobRun(config, run, terminal, partial(LocalReplicas, config, run, entry=entry))
        ended, _ = asyncio.run(asyncio.wait_for(job.run(), deadline_s))
    assert ended == code
    return run
