"""What a scheduler is asked for, and the configuration that a rendered file carries.

The site's settings come from the command line; none of them changes what is trained. The configuration is the
user's, made fit for pieces that start on several machines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ft_hsdp.config import Config, NetworkConfig, TimeoutsConfig
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.render.text import CommentedValue, document


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


REACH_S = 300.0  # pieces wait in a queue, one by one
FOLDER = "/runs"  # where pods have the run directory
COMMAND = ("-m", "ft_hsdp.launch.cli")
_SECRET = re.compile("token|secret|passw|credential|key$", re.IGNORECASE)


def spread(config: Config, **job: str) -> Config:
    """`config` for several machines: what stands at its default for one is changed. job: keys of that section.

    Raises ConfigError for settings that would not keep a job running there.
    """
    if config.lighthouse.count > 1:
        raise ConfigError("lighthouse.count", config.lighthouse.count, "1: one is rendered, and started again")
    network, waits = config.network, config.timeouts
    if network.host == NetworkConfig().host:
        network = network.model_copy(update={"host": "0.0.0.0"})
    if waits.reach_s == TimeoutsConfig().reach_s:
        waits = waits.model_copy(update={"reach_s": REACH_S})
    changed = {"network": network, "timeouts": waits, "job": config.job.model_copy(update=job)}
    return config.model_copy(update=changed)


def in_pods(config: Config, claim: str | None) -> Config:
    """`config` for pods, whose folder of runs is `FOLDER`; a `claim` is a volume that all of them have there.

    Raises ConfigError for files that a pod would not have.
    """
    if config.network.tls_certificate is not None:
        raise ConfigError(
            "network.tls_certificate",
            config.network.tls_certificate,
            "null: pods get no files but the configuration",
        )
    if config.checkpoint.every and claim is None:
        raise ConfigError(
            "checkpoint.every", config.checkpoint.every, "0 without --claim: all pods must have its folder"
        )
    folder = config.checkpoint.dir
    if folder is not None and not folder.startswith(f"{FOLDER}/"):
        raise ConfigError("checkpoint.dir", folder, f"null or a folder in {FOLDER}, where the pods' volume is")
    changed: dict[str, Any] = {"job": config.job.model_copy(update={"runs_dir": FOLDER})}
    if claim is not None and config.checkpoint.key is None:  # a pod's own folders do not outlive it
        changed["checkpoint"] = config.checkpoint.model_copy(update={"key": f"{FOLDER}/checkpoint.key"})
    return config.model_copy(update=changed)


def dump(config: Config) -> str:
    """`config` as YAML, what stands at its default left out; `load` makes an equal one of it.

    Raises ConfigError for a secret, without showing it: what is rendered is read by many.
    """
    for url in config.lighthouse.etcd:
        if "@" in urlsplit(url).netloc:
            allowed = (
                "URLs without one; FT_HSDP_ETCD_USER and FT_HSDP_ETCD_PASSWORD in the lighthouse's environment"
            )
            raise ConfigError("lighthouse.etcd", "a password", allowed)
    for name in config.ray.runtime_env.get("env_vars") or ():
        if _SECRET.search(str(name)):
            raise ConfigError("ray.runtime_env", str(name), "no secrets: they come to the pods from a Secret")
    return document(_noted(config.model_dump(exclude_defaults=True))) or "{}\n"


def _noted(said: dict[str, Any]) -> dict[str, Any]:
    """`said`, with a word on what `spread` changes."""
    for section, key, value, why in (
        ("network", "host", "0.0.0.0", "a replica listens where it reaches the lighthouse from"),
        ("timeouts", "reach_s", REACH_S, "the pieces start when there is room for them"),
    ):
        if said.get(section, {}).get(key) == value:
            said[section][key] = CommentedValue(why, value)
    return said
