"""`up`: a whole job on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ft_hsdp.config import Config
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD
from ft_hsdp.launch.backend.local import LocalBackend
from ft_hsdp.launch.job import JobResources, MakeResources, run_job, start_run
from ft_hsdp.launch.lighthouse_process import LighthouseFleet, check_port
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.run.summary import Summary


def up(config: Config, *, stream: TextIO | None = None) -> tuple[int, Summary | None]:
    """Run a job until every replica is done; return the exit code and the summary.

    stream takes the progress, stdout by default. Codes: 0, 75 with lost replicas, 64 where a rank refused its
    configuration, 130 and 143 after Ctrl-C and SIGTERM. Raises ConfigError before anything is started.
    """
    check_port(config)
    check_device(config)
    prepare_data(config)
    run = start_run(config)
    return run_job(config, run, local_resources(config, run), stream or sys.stdout)


def local_resources(
    config: Config,
    run: RunDir,
    *,
    entry: str = ENTRY,
    preload: tuple[str, ...] = PRELOAD,
    lighthouse: str = "lighthouse",
) -> MakeResources:
    """Return a function that makes a job's backend and lighthouses on this machine.

    Args:
        config: The job's configuration.
        run: Its run directory.
        entry: What runs in a rank, as in `ForkServer`.
        preload: The modules that the fork server imports.
        lighthouse: The module that runs as a lighthouse.
    """

    def make(emit: Callable[[Row], None]) -> JobResources:
        backend = LocalBackend(
            run,
            entry=entry,
            preload=preload,
            boot_s=config.timeouts.boot_s,
            spawn_s=config.timeouts.spawn_s,
            spares=config.spares // config.ranks_per_replica,
            emit=emit,
            quiet_s=config.restart.hold_s,
        )
        return JobResources(backend, LighthouseFleet(run, config, emit, module=lighthouse))

    return make


def check_device(config: Config) -> str:
    """Return in words what ranks compute on. Raises ConfigError on train.device."""
    if config.train.device == "cpu":
        return config.train.device
    # Who only counts GPUs must not initialize CUDA: ranks are forked, from a process that inherits this.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from ft_hsdp.train.identity import describe  # a job on CPUs starts without torch in this process

    return describe(config.train.device, config.ranks_per_replica)


def prepare_data(config: Config) -> Path:
    """Make the file of tokens, if it is not there. Raises ConfigError on data.path."""
    from ft_hsdp.train import tokens  # numpy is not needed for --help

    cache = Path(config.job.runs_dir).resolve() / ".cache"
    return tokens.prepare(config.data.path, config.data.tokenizer, config.data.max_bytes, cache)
