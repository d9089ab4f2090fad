"""`python -m ft_hsdp.bench.recovery.job CONFIG`: what `launcher.py up` does, with the trainee in its ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ft_hsdp.config import load
from ft_hsdp.launch.backend.forkserver import PRELOAD
from ft_hsdp.launch.job import run_job, start_run
from ft_hsdp.launch.local import local_resources

TRAINEE = "ft_hsdp.bench.recovery.trainee:main"
PRELOADED = (*PRELOAD, "ft_hsdp.bench.recovery.trainee")


def main(argv: Sequence[str]) -> int:
    """Run the job until it is stopped; its exit code."""
    config = load(Path(argv[0]))
    run = start_run(config)
    resources = local_resources(config, run, entry=TRAINEE, preload=PRELOADED)
    code, _ = run_job(config, run, resources, sys.stdout, live=False)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
