"""`up`: a whole job on this machine; and what must be right here before a job starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

from ft_hsdp.config import Config
from ft_hsdp.config.entry import stamped
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import DISK
from ft_hsdp.launch.backend.forkserver import ENTRY, PRELOAD
from ft_hsdp.launch.backend.gpus import check_device, gpus_here
from ft_hsdp.launch.backend.hosts import EmulatedHosts
from ft_hsdp.launch.backend.local import LocalBackend
from ft_hsdp.launch.backend.spare_agents import SpareAgents
from ft_hsdp.launch.job import JobResources, MakeResources, run_job, start_run
from ft_hsdp.launch.lighthouse_process import LighthouseFleet, check_port
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.launch.run.summary import Summary
from ft_hsdp.memory.copies import MemberHosts, unmet
from ft_hsdp.memory.hosts import DOMAINS_VARIABLE, SLURM_VARIABLE, Host, Level
from ft_hsdp.train.identity import HOST_VARIABLE, host_path


def up(config: Config, *, stream: TextIO | None = None) -> tuple[int, Summary | None]:
    """Run a job on this machine until every replica is done. Blocks.

    Args:
        config: The job's configuration.
        stream: Where the progress is shown; None: stdout.

    Returns:
        The exit code, and the summary if there is one. The code is 0; 75 if replicas were lost; 64 if a rank
        refused its configuration; 130 or 143 after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: The job cannot run here; nothing was started.
    """
    config = stamped(config)
    check_port(config)
    check_device(config)
    check_copies(config)
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
            preload=(*preload, *config.preload),
            boot_s=config.timeouts.boot_s,
            spawn_s=config.timeouts.spawn_s,
            spares=config.spares // config.ranks_per_replica,
            emit=emit,
            quiet_s=config.timeouts.hold_s,
            hosts=emulated_hosts(config),
            agents=SpareAgents(config, run, emit) if config.hosts.spare else None,
            shrink_to=config.memory.shrink_to,
            gpus=gpus_here(config),
        )
        return JobResources(backend, LighthouseFleet(run, config, emit, module=lighthouse))

    return make


def emulated_hosts(config: Config) -> EmulatedHosts:
    """Return the hosts for which this machine stands, those of spare replicas included.

    Only hosts that the configuration asks for are replaced by those of spare replicas.
    """
    hosts, per_replica = config.hosts, hosts_of_a_replica(config, os.environ)
    of_spares = config.spares // config.ranks_per_replica * (hosts.per_replica or 0)
    level: Level = "zone" if config.memory.apart == "zone" else "rack"  # a spare host is apart in any case
    return EmulatedHosts(per_replica, config.ranks_per_replica, hosts.spare, of_spares, hosts.labels, level)


def hosts_of_a_replica(config: Config, environment: Mapping[str, str]) -> int | None:
    """Return for how many hosts of each replica this machine stands: one, if nothing says otherwise.

    Args:
        config: The job's configuration, whose `hosts.per_replica` comes first.
        environment: Of this process.

    Returns:
        None if the machine stands for itself alone, because a variable says which host it is, or where it stands.
    """
    said = any(environment.get(name) for name in (HOST_VARIABLE, DOMAINS_VARIABLE, SLURM_VARIABLE))
    return config.hosts.per_replica or (None if said else 1)


def check_copies(config: Config) -> None:
    """Compare `memory.copies` with the hosts for which this machine stands.

    Raises:
        ConfigError: They cannot hold so many copies.
    """
    memory, ranks, per_replica = config.memory, config.ranks_per_replica, hosts_of_a_replica(config, os.environ)
    if memory.copies is None or memory.copies == 1:
        return

    def host(replica: int, rank: int) -> Host:
        named = {} if per_replica is None else {HOST_VARIABLE: f"r{replica}h{rank // (ranks // per_replica)}"}
        return Host.parse(host_path(config.hosts.labels, {**os.environ, **named}))

    members = [MemberHosts(r, tuple(host(r, k) for k in range(ranks)), True) for r in range(config.replicas)]
    if allowed := unmet(members, memory.copies, memory.apart):
        raise ConfigError("memory.copies", memory.copies, allowed)


def prepare_data(config: Config) -> None:
    """Make the folder of runs, and in it the file of tokens for the built-in trainer, if they do not exist.

    Raises:
        ConfigError: data.path cannot be read, or job.runs_dir cannot be made.
        Retryable: The file cannot be written.
    """
    runs_dir = Path(config.job.runs_dir).resolve()
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK:
            raise
        raise ConfigError("job.runs_dir", str(runs_dir), f"a folder that can be made ({error.strerror})") from None
    if config.entry is None:
        from ft_hsdp.train import tokens  # numpy is not needed for --help

        tokens.prepare(config.data.path, config.data.tokenizer, config.data.max_bytes, runs_dir / ".cache")
