"""The training loop of the jobs under test: the public API around a model that waits."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import ft_hsdp
from ft_hsdp.bench.recovery.scene import FILE, Scene
from ft_hsdp.bench.waiting import Nothing, Waiting
from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_OK, FtHsdpError
from ft_hsdp.train.trainer import build_optimizer


def main(config: Config, replica: int, run: Path) -> int:
    """Run one rank; the exit code."""
    scene = Scene(**json.loads((run.parent / FILE).read_text()))
    try:
        job = ft_hsdp.join(config, replica, run)
        signal.signal(signal.SIGTERM, lambda *_: job.leave())
        model = job.shard(Waiting(scene.layers, scene.elements, scene.wait_s))
        optim = job.optimizer(build_optimizer(config, list(model.parameters())))
        job.warm_up(lambda: model(None).backward())
        for batch in job.batches(Nothing()):
            model(batch).backward()
            optim.step()
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_OK
