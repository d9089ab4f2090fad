"""The training loop of the jobs under test: the public API around the model of a scene."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import ft_hsdp
from ft_hsdp.bench.recovery import models
from ft_hsdp.bench.recovery.scene import FILE, Scene
from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_LEFT, FtHsdpError
from ft_hsdp.train.identity import Calling
from ft_hsdp.train.trainer import build_optimizer


def main(config: Config, replica: int | Calling, run: Path) -> int:
    """Run one rank until it is told to leave; the exit code."""
    scene = Scene(**json.loads((Path(config.job.runs_dir) / FILE).read_text()))
    try:
        job = ft_hsdp.join(config, replica, run)
        data = models.data(scene)
        model = job.shard(models.model(scene))
        optim = job.optimizer(build_optimizer(config, list(model.parameters())))
        job.warm_up(lambda: model(data.batch(0, 0, job.rank)).backward())
        signal.signal(signal.SIGTERM, lambda *_: job.leave())
        for batch in job.batches(data):
            model(batch).backward()
            optim.step()
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_LEFT
