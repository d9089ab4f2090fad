"""`python -m ft_hsdp.bench.overhead.ray_job CONFIG ADDRESS`: what `launcher.py submit` does, with the trainee."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ft_hsdp.bench.recovery.job import PRELOADED, TRAINEE
from ft_hsdp.config import load
from ft_hsdp.launch.job import JobResources, JobRun
from ft_hsdp.launch.lighthouse_process import furnish
from ft_hsdp.launch.ray.backend import RayBackend
from ft_hsdp.launch.ray.cluster import connected
from ft_hsdp.launch.ray.lighthouse import RayLighthouse
from ft_hsdp.launch.run.directory import Row, RunDir, claim, identity, write_json
from ft_hsdp.launch.run.terminal import Terminal


def main(argv: Sequence[str]) -> int:
    """Run the job until it is stopped; its exit code."""
    config = load(Path(argv[0]))
    with connected(argv[1]) as (cluster, said):
        run = RunDir(Path(config.job.runs_dir) / config.job.name)
        claim(run)
        said.keep(run.path / "ray.log")
        furnish(run, config)
        write_json(run.supervisor, identity())

        def means(emit: Callable[[Row], None]) -> JobResources:
            lighthouse = RayLighthouse(run, cluster.node, emit)
            urls = lambda: lighthouse.urls  # noqa: E731
            return JobResources(
                RayBackend(config, run, urls, cluster.cwd, emit, entry=TRAINEE, preload=PRELOADED), lighthouse
            )

        with Terminal(config, sys.stderr, live=False) as terminal:
            code, _ = asyncio.run(JobRun(config, run, terminal, means).run())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
