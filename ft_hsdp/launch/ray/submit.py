"""`submit`: the job of `up` on a Ray cluster. This process is the job's supervisor, and a driver of it."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.forkserver import ENTRY, PRELOAD
from ft_hsdp.launch.job import Job, Means
from ft_hsdp.launch.lighthouse_process import check_port, furnish
from ft_hsdp.launch.local import prepare_data
from ft_hsdp.launch.ray.cluster import Cluster, connected
from ft_hsdp.launch.ray.engine import RayEngine
from ft_hsdp.launch.ray.lighthouse import RayLighthouse
from ft_hsdp.launch.ray.placement import roomy
from ft_hsdp.launch.ray.starting import loopback
from ft_hsdp.launch.rundir import Row, RunDir, claim, identity, write_json
from ft_hsdp.launch.summary import Summary
from ft_hsdp.launch.terminal import Terminal


def submit(
    config: Config, address: str, *, stream: TextIO | None = None, entry: str = ENTRY
) -> tuple[int, Summary | None]:
    """Run a job on the cluster at `address` ("auto" or HOST:PORT) until every replica is done; see `up`.

    entry: what runs in a rank.

    Raises ConfigError and ClusterUnreachable before anything is started.
    """
    check(config)
    prepare_data(config)
    out = stream or sys.stdout
    with connected(address, config.ray.runtime_env) as (cluster, said):
        alone = cluster.addresses <= {cluster.address} and roomy(config, cluster.resources)
        config = within_reach(config, cluster.address, alone)
        check_port(config)
        run = RunDir(Path(config.job.runs_dir).resolve() / config.job.name)
        claim(run)
        said.keep(run.path / "ray.log")
        furnish(run, config)
        write_json(run.supervisor, identity())
        with Terminal(config, out) as terminal:
            return asyncio.run(Job(config, run, terminal, there(config, run, cluster, entry=entry)).run())


def there(
    config: Config, run: RunDir, cluster: Cluster, *, entry: str = ENTRY, preload: tuple[str, ...] = PRELOAD
) -> Callable[[Callable[[Row], None]], Means]:
    """The means of a cluster. entry, preload: see `ForkServer`."""

    def means(emit: Callable[[Row], None]) -> Means:
        lighthouse = RayLighthouse(run, cluster.node, emit)
        engine = RayEngine(config, run, lambda: lighthouse.urls, cluster.cwd, emit, entry=entry, preload=preload)
        return Means(engine, lighthouse)

    return means


def check(config: Config) -> None:
    """Raise ConfigError for what a cluster cannot give, or does not need."""
    if config.train.device != "cpu" and not config.ray.gpus_per_rank:
        raise ConfigError(
            "ray.gpus_per_rank", 0, f"1 with train.device {config.train.device}: ranks see no other GPUs"
        )
    if config.lighthouse.count > 1:
        raise ConfigError("lighthouse.count", config.lighthouse.count, "1 with submit: Ray starts it again")
    for i, rule in enumerate(config.chaos):
        if rule.kind != "signal":
            allowed = "signal with submit: the other kinds act on processes of this machine"
            raise ConfigError(f"chaos.{i}.kind", rule.kind, allowed)


def within_reach(config: Config, own: str, alone: bool) -> Config:
    """The configuration with an address at which other nodes reach this one, whose address is `own`.

    alone: the cluster is this node, and has room for the job; then loopback does.
    """
    host = config.network.host
    if not _everywhere(host) and (alone or not loopback(host)):
        return config
    return config.model_copy(update={"network": config.network.model_copy(update={"host": own})})


def _everywhere(host: str) -> bool:
    """Whether an address means all of a machine's own, so that none is known to others."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
