"""Joining: how a process becomes one rank of a replica, from torchrun's environment and the files of the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from ft_hsdp import secret
from ft_hsdp.config import Config, load
from ft_hsdp.control.lighthouses import listed, named
from ft_hsdp.errors import ConfigError
from ft_hsdp.state.start import TOKEN_VARIABLE
from ft_hsdp.train import device as devices
from ft_hsdp.train.calling import Calling, FromEnvironment
from ft_hsdp.train.ground import Place
from ft_hsdp.train.job import Job
from ft_hsdp.train.life import begin


def join(
    config: Config | str | Path, replica: int | Calling, run: Path | None = None, lighthouse: str | None = None
) -> Job:
    """Join a job as one rank of ``replica``; the rank comes from torchrun's environment.

    ``run`` is the run directory, ``lighthouse`` its URL[,URL]; both follow from the configuration on one machine.
    What ft_hsdp's own launcher starts is called instead: a spare hears of its replica when it is needed.

    Raises:
        ConfigError: the configuration cannot be used, or the run does not exist.
    """
    if not isinstance(config, Config):
        config = load(Path(config))
    calling = FromEnvironment(replica) if isinstance(replica, int) else replica
    if isinstance(replica, int) and not 0 <= replica < config.slots:
        raise ConfigError(
            "replica", replica, f"0 to {config.slots - 1} (there are {config.slots} replicas at most)"
        )
    run = run or Path(config.job.runs_dir) / config.job.name
    file = run / "lighthouse.json"
    try:
        urls = listed(lighthouse) if lighthouse else named(json.loads(file.read_text()))
        if not urls:
            raise ValueError("lighthouse.json names none")
        token = os.environ.get(TOKEN_VARIABLE) or secret.current(run / "token")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("run", str(run), f"the directory of a run with a lighthouse ({error})") from error
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks != config.ranks_per_replica:
        raise ConfigError("WORLD_SIZE", ranks, f"ranks_per_replica, which is {config.ranks_per_replica}")
    device = devices.choose(config.train.device, int(os.environ.get("LOCAL_RANK", rank)))
    torch.set_num_threads(config.train.threads)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    first = os.environ.get("LOCAL_RANK", str(rank)) == "0"
    place = Place(rank, ranks, run, urls, token, host, first, None if lighthouse else file)
    call = calling.heard()
    life = None if call is None else begin(config, place, call)  # the state agent starts meanwhile
    _connect_ranks(rank, ranks, "" if life is None else life.incarnation, devices.backend(device))
    return Job(config, place, calling, life, device)


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
