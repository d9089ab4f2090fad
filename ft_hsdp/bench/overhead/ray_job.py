"""`python -m ft_hsdp.bench.overhead.ray_job CONFIG ADDRESS`: what `launcher.py submit` does, with the trainee."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ft_hsdp.bench.recovery.job import PRELOADED, TRAINEE
from ft_hsdp.config import load
from ft_hsdp.launch.job import run_job, start_run
from ft_hsdp.launch.ray.cluster import connected
from ft_hsdp.launch.ray.submit import cluster_resources


def main(argv: Sequence[str]) -> int:
    """Run the job until it is stopped; its exit code."""
    config = load(Path(argv[0]))
    with connected(argv[1]) as (cluster, said):
        run = start_run(config)
        said.keep(run.path / "ray.log")
        resources = cluster_resources(config, run, cluster, entry=TRAINEE, preload=PRELOADED)
        code, _ = run_job(config, run, resources, sys.stderr, live=False)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
