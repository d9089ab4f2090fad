"""`python -m ft_hsdp.bench.recovery.job CONFIG [RAY]` runs a job with the trainee in its ranks.

It does what `launcher.py up` does; with the address of a Ray cluster, what `launcher.py submit` does. If the setup
asks for it, the built-in trainer or the entry of the configuration trains instead of the trainee.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ft_hsdp.bench.recovery.setup import FILE, RecoverySetup
from ft_hsdp.config import load
from ft_hsdp.config.entry import stamped
from ft_hsdp.launch.backend.forkserver import PRELOAD
from ft_hsdp.launch.job import run_job, start_run
from ft_hsdp.launch.local import local_resources

TRAINEE = "ft_hsdp.bench.trainee:main"
PRELOADED = (*PRELOAD, "ft_hsdp.bench.trainee")


def main(argv: Sequence[str]) -> int:
    """Run the job until it is stopped; return its exit code."""
    config = stamped(load(Path(argv[0])))
    setup = RecoverySetup(**json.loads((Path(config.job.runs_dir) / FILE).read_text()))
    entry: dict[str, Any] = {} if setup.built_in else {"entry": TRAINEE, "preload": PRELOADED}
    with ExitStack() as stack:
        if not argv[1:]:
            run = start_run(config)
            resources = local_resources(config, run, **entry)
        else:
            from ft_hsdp.launch.ray.cluster import connected
            from ft_hsdp.launch.ray.submit import cluster_resources

            cluster, said = stack.enter_context(connected(argv[1]))
            run = start_run(config)
            said.keep(run.path / "ray.log")
            resources = cluster_resources(config, run, cluster, **entry)
        code, _ = run_job(config, run, resources, sys.stderr, live=False)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
