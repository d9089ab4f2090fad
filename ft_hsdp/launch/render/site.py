"""The site: what a scheduler is asked for, and where; none of it changes what is trained."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Site:
    """Sizes: `nodes` of a replica, `cpus` and `gpus` of a rank, `memory_gib` of a node (None: the site's default).

    The rest is Slurm's (partition, account, time, python) or Kubernetes' (image, namespace, claim, secret).
    """

    nodes: int = 1
    cpus: int | None = None
    gpus: int | None = None
    memory_gib: int | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    python: str = "python"
    image: str = ""
    namespace: str | None = None
    claim: str | None = None
    secret: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What one node of a replica holds: so many of its ranks, with so many processors and GPUs in all."""

    nodes: int
    ranks: int
    cpus: int
    gpus: int


_NAME = (re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@-]{0,127}"), "a name")
_TIME = (re.compile(r"[0-9]+(-[0-9]+)?(:[0-9]{1,2}){0,2}"), "Slurm's MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS")
_LABEL = (re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"), "a name in lower case (RFC 1123)")
_OBJECT = (re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"), "the name of an object (RFC 1123)")
_IMAGE = (re.compile(r"[!-~]{1,512}"), "the name of an image, such as registry/ft_hsdp:1")
_ALLOWED = {
    "partition": _NAME,
    "account": _NAME,
    "time": _TIME,
    "namespace": _LABEL,
    "claim": _OBJECT,
    "secret": _OBJECT,
    "image": _IMAGE,
}


def check(site: Site) -> None:
    """Raise ConfigError on an option whose value its scheduler would refuse, or take for something else."""
    for field, (pattern, allowed) in _ALLOWED.items():
        value = getattr(site, field)
        if value and not pattern.fullmatch(value):
            raise ConfigError(f"--{field}", value, allowed)
    if site.memory_gib is not None and not 1 <= site.memory_gib <= 65536:
        raise ConfigError("--memory-gib", site.memory_gib, "1 to 65536")


def shape(config: Config, site: Site) -> Shape:
    """What one node of a replica holds. Raises ConfigError where the ranks do not fit the nodes."""
    ranks = config.ranks_per_replica
    if site.nodes < 1 or ranks % site.nodes:
        allowed = f"a divisor of ranks_per_replica ({ranks}): each node has as many ranks"
        raise ConfigError("--nodes-per-replica", site.nodes, allowed)
    if site.nodes > 1 and not config.network.allow:
        allowed = "the networks of the nodes, such as [10.0.0.0/8]: the ranks of a replica are on several"
        raise ConfigError("network.allow", [], allowed)
    cuda = config.train.device == "cuda"
    cpus = config.train.threads if site.cpus is None else site.cpus
    gpus = int(cuda) if site.gpus is None else site.gpus
    if not 1 <= cpus <= 1024:
        raise ConfigError("--cpus-per-rank", cpus, "1 to 1024")
    if not int(cuda) <= gpus <= 64:
        raise ConfigError("--gpus-per-rank", gpus, f"{int(cuda)} to 64 with train.device {config.train.device}")
    held = ranks // site.nodes
    return Shape(site.nodes, held, held * cpus, held * gpus)
