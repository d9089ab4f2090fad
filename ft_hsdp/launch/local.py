"""`up`: a whole job on this machine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ft_hsdp.config import Config
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD
from ft_hsdp.launch.backend.local import LocalBackend
from ft_hsdp.launch.job import JobResources, JobRun
from ft_hsdp.launch.lighthouse_process import LighthouseFleet, check_port, furnish
from ft_hsdp.launch.run.directory import Row, RunDir, claim, identity, write_json
from ft_hsdp.launch.run.summary import Summary
from ft_hsdp.launch.run.terminal import Terminal


def up(config: Config, *, stream: TextIO | None = None) -> tuple[int, Summary | None]:
    """Run a job until every replica is done; return the exit code and the summary.

    stream takes the progress, stdout by default. Codes: 0, 75 with lost replicas, 64 where a rank refused its
    configuration, 130 and 143 after Ctrl-C and SIGTERM. Raises ConfigError before anything is started.
    """
    check_port(config)
    check_device(config)
    prepare_data(config)
    run = RunDir(Path(config.job.runs_dir).resolve() / config.job.name)
    claim(run)
    furnish(run, config)
    write_json(run.supervisor, identity())
    with Terminal(config, stream or sys.stdout) as terminal:
        return asyncio.run(JobRun(config, run, terminal, here(config, run)).run())


def here(
    config: Config,
    run: RunDir,
    *,
    entry: str = ENTRY,
    preload: tuple[str, ...] = PRELOAD,
    lighthouse: str = "lighthouse",
) -> Callable[[Callable[[Row], None]], JobResources]:
    """Return the resources of this machine. entry, preload, lighthouse: what runs in their processes."""

    def means(emit: Callable[[Row], None]) -> JobResources:
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

    return means


def check_device(config: Config) -> str:
    """Return in words what ranks compute on. Raises ConfigError on train.device."""
    if config.train.device == "cpu":
        return config.train.device
    # Who only counts GPUs must not initialize CUDA: ranks are forked, from a process that inherits this.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from ft_hsdp.train.device import describe  # a job on CPUs starts without torch in this process

    return describe(config.train.device, config.ranks_per_replica)


def prepare_data(config: Config) -> Path:
    """Make the file of tokens, if it is not there. Raises ConfigError on data.path."""
    from ft_hsdp.train import tokens  # numpy is not needed for --help

    cache = Path(config.job.runs_dir).resolve() / ".cache"
    return tokens.prepare(config.data.path, config.data.tokenizer, config.data.max_bytes, cache)
