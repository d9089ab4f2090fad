"""`python -m ft_hsdp.bench.recovery.job CONFIG`: what `launcher.py up` does, with the trainee in its ranks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from ft_hsdp.config import load
from ft_hsdp.launch.backend.forkserver import PRELOAD
from ft_hsdp.launch.job import JobRun
from ft_hsdp.launch.lighthouse_process import furnish
from ft_hsdp.launch.local import here
from ft_hsdp.launch.run.directory import RunDir, claim, identity, write_json
from ft_hsdp.launch.run.terminal import Terminal

TRAINEE = "ft_hsdp.bench.recovery.trainee:main"
PRELOADED = (*PRELOAD, "ft_hsdp.bench.recovery.trainee")


def main(argv: Sequence[str]) -> int:
    """Run the job until it is stopped; its exit code."""
    config = load(Path(argv[0]))
    run = RunDir(Path(config.job.runs_dir) / config.job.name)
    claim(run)
    furnish(run, config)
    write_json(run.supervisor, identity())
    with Terminal(config, sys.stdout, live=False) as terminal:
        job = JobRun(config, run, terminal, here(config, run, entry=TRAINEE, preload=PRELOADED))
        code, _ = asyncio.run(job.run())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
