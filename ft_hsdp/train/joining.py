"""Joining: how a process becomes one rank of a replica, from torchrun's environment and the files of the run."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from ft_hsdp import failpoints
from ft_hsdp.config import Config, load
from ft_hsdp.errors import ConfigError
from ft_hsdp.state.start import TOKEN_VARIABLE, Starter
from ft_hsdp.train import device as devices
from ft_hsdp.train.job import Job
from ft_hsdp.train.wiring import Place


def join(config: Config | str | Path, replica: int, run: Path | None = None, lighthouse: str | None = None) -> Job:
    """Join a job as one rank of ``replica``; the rank comes from torchrun's environment.

    ``run`` is the run directory, ``lighthouse`` its URL; both follow from the configuration on one machine.

    Raises:
        ConfigError: the configuration cannot be used, or the run does not exist.
    """
    if not isinstance(config, Config):
        config = load(Path(config))
    if not 0 <= replica < config.replicas:
        raise ConfigError("replica", replica, f"0 to {config.replicas - 1} (replicas: {config.replicas})")
    run = run or Path(config.job.runs_dir) / config.job.name
    try:
        url = lighthouse or json.loads((run / "lighthouse.json").read_text())["url"]
        token = os.environ.get(TOKEN_VARIABLE) or (run / "token").read_text().strip()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("run", str(run), f"the directory of a run with a lighthouse ({error})") from error
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks != config.ranks_per_replica:
        raise ConfigError("WORLD_SIZE", ranks, f"ranks_per_replica, which is {config.ranks_per_replica}")
    device = devices.choose(config.train.device, int(os.environ.get("LOCAL_RANK", rank)))
    torch.set_num_threads(config.train.threads)
    name, life = (
        os.environ.get("TORCHELASTIC_RUN_ID", "run"),
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )
    lives = [f"{replica}-{name}-{n}" for n in range(life + 1)]
    failpoints.arm(config.debug.failpoints, replica, rank, life)
    starter = _starter(config, replica, run, token) if os.environ.get("LOCAL_RANK", str(rank)) == "0" else None
    _connect_ranks(rank, ranks, lives[-1], devices.backend(device))
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    place = Place(replica, rank, ranks, lives[-1], tuple(lives[:-1]), run, url, token, host, starter)
    return Job(config, place, device)


def _starter(config: Config, replica: int, run: Path, token: str) -> Starter:
    """Start the state agent of this host, if there is none; it lives as long as whoever started this rank."""
    host = config.network.state_interface or config.network.host
    log = run / "replicas" / str(replica) / f"agent-{socket.gethostname()}.log"
    starter = Starter(token, replica, host, os.getppid(), log)
    starter.ensure()
    return starter


def _connect_ranks(rank: int, ranks: int, life: str, backend: str) -> None:
    """Form the process group of a replica; ``life`` is its incarnation.

    torchrun's agent keeps one store over all restarts of its workers: without a prefix the ranks of this life
    would find the addresses of the last one there.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=False)
    dist.init_process_group(backend, store=dist.PrefixStore(life, store), rank=rank, world_size=ranks)


__all__ = ["join"]
