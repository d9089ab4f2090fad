"""What a scheduler is asked for, and the configuration that a rendered file contains.

The site's settings come from the command line and do not change what is trained. The configuration is the user's,
changed so that the job's parts can start on several machines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ft_hsdp.config import Config, NetworkConfig, TimeoutsConfig, public
from ft_hsdp.config.entry import is_function
from ft_hsdp.config.loader import YamlDumper
from ft_hsdp.config.network import WEBHOOK
from ft_hsdp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Site:
    """What the command line says of the site. None: the scheduler's default."""

    nodes: int | None = None  # per replica; None: hosts.per_replica, or 1
    cpus: int | None = None  # per rank; None: train.threads
    gpus: int | None = None  # per rank; None: 1 with train.device cuda, else 0
    memory_gib: int | None = None  # per node
    # Of Slurm:
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    python: str = "python"
    # Of Kubernetes:
    image: str = ""
    namespace: str | None = None
    claim: str | None = None
    secret: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a scheduler is asked for: a number of nodes, each by itself, so that one is lost alone."""

    part: str  # what each is: "replica", or "machine" if any replica may have it
    count: int
    cpus: int  # of each
    gpus: int  # of each


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
    """Check the options that are written into the file.

    Raises:
        ConfigError: The scheduler would refuse a value, or could misread it.
    """
    for field, (pattern, allowed) in _ALLOWED.items():
        value = getattr(site, field)
        if value and not pattern.fullmatch(value):
            raise ConfigError(f"--{field}", value, allowed)
    if site.memory_gib is not None and not 1 <= site.memory_gib <= 65536:
        raise ConfigError("--memory-gib", site.memory_gib, "1 to 65536")


def shape(config: Config, site: Site) -> Shape:
    """Return what the scheduler is asked for.

    A replica on one node is started there again and again. If it has several, or if there are to be spare ones
    (hosts.spare), each node is a machine to which the lighthouse assigns ranks.

    Raises:
        ConfigError: The ranks cannot be spread evenly over the nodes, or a size is out of range.
    """
    ranks, hosts = config.ranks_per_replica, config.hosts
    nodes = (hosts.per_replica or 1) if site.nodes is None else site.nodes
    if nodes < 1 or ranks % nodes:
        allowed = f"a divisor of ranks_per_replica ({ranks}): each node gets the same number of ranks"
        raise ConfigError("--nodes-per-replica", nodes, allowed)
    if nodes != (hosts.per_replica or nodes):
        raise ConfigError("--nodes-per-replica", nodes, f"{hosts.per_replica}, as hosts.per_replica")
    if nodes > 1 and not config.network.allow:
        allowed = "the networks of the nodes, such as [10.0.0.0/8]: the ranks of a replica are on several nodes"
        raise ConfigError("network.allow", [], allowed)
    cuda = config.train.device == "cuda"
    cpus = config.train.threads if site.cpus is None else site.cpus
    gpus = int(cuda) if site.gpus is None else site.gpus
    if not 1 <= cpus <= 1024:
        raise ConfigError("--cpus-per-rank", cpus, "1 to 1024")
    if not int(cuda) <= gpus <= 64:
        raise ConfigError("--gpus-per-rank", gpus, f"{int(cuda)} to 64 with train.device {config.train.device}")
    per_node, alone = ranks // nodes, nodes == 1 and not hosts.spare
    count = config.slots * nodes + hosts.spare
    return Shape("replica" if alone else "machine", count, per_node * cpus, per_node * gpus)


REACH_S = 300.0  # timeouts.reach_s: each part of the job waits in the scheduler's queue by itself
FOLDER = "/runs"  # job.runs_dir in pods
COMMAND = ("-m", "ft_hsdp.launch.cli")
_SECRET = re.compile("token|secret|passw|credential|key$", re.IGNORECASE)


def spread(config: Config, layout: Shape | None = None, **job: str) -> Config:
    """Return `config` for several machines: with other defaults of network.host and timeouts.reach_s.

    Args:
        layout: Says on how many machines a replica stands, if those are asked for one by one.
        job: New values of keys in the section `job`.

    Raises:
        ConfigError: lighthouse.count is above 1.
    """
    if config.lighthouse.count > 1:
        allowed = "1: the scheduler restarts the only lighthouse"
        raise ConfigError("lighthouse.count", config.lighthouse.count, allowed)
    network, waits = config.network, config.timeouts
    if network.host == NetworkConfig().host:
        network = network.model_copy(update={"host": "0.0.0.0"})
    if "reach_s" not in waits.model_fields_set:
        factor = waits.reach_s / TimeoutsConfig().reach_s
        waits = waits.model_copy(update={"reach_s": factor * REACH_S})
    changed = {"network": network, "timeouts": waits, "job": config.job.model_copy(update=job)}
    if layout is not None and layout.part == "machine":
        nodes = (layout.count - config.hosts.spare) // config.slots
        changed["hosts"] = config.hosts.model_copy(update={"per_replica": nodes, "spare": 0})
    return config.model_copy(update=changed)


def in_pods(config: Config, claim: str | None) -> Config:
    """Return `config` for pods, whose folder of runs is `FOLDER`.

    Args:
        claim: The volume that all pods mount there; None: each pod has its own folder.

    Raises:
        ConfigError: The configuration names files that a pod would not have.
    """
    if config.network.tls_certificate is not None:
        raise ConfigError(
            "network.tls_certificate",
            config.network.tls_certificate,
            "null: the configuration is the only file that pods get",
        )
    for key, none in (("every", "0"), ("dir", "null")) if claim is None else ():
        if value := getattr(config.checkpoint, key):
            raise ConfigError(
                f"checkpoint.{key}", value, f"{none} without --claim: all pods must share its folder"
            )
    entry = config.entry
    if entry is not None and not is_function(entry) and not entry.startswith("/"):
        allowed = (
            "a script by its absolute path in the image, or module:function: pods get the configuration alone"
        )
        raise ConfigError("entry", entry, allowed)
    folder = config.checkpoint.dir
    if folder is not None and not folder.startswith(f"{FOLDER}/"):
        raise ConfigError("checkpoint.dir", folder, f"null or a folder in {FOLDER}, the volume of the pods")
    changed: dict[str, Any] = {"job": config.job.model_copy(update={"runs_dir": FOLDER})}
    if claim is not None and config.checkpoint.key is None:  # a pod's own folders do not outlive it
        changed["checkpoint"] = config.checkpoint.model_copy(update={"key": f"{FOLDER}/checkpoint.key"})
    return config.model_copy(update=changed)


def what_runs(config: Config) -> str:
    """Return what follows the number of ranks in the head of a file: of what they run, if that is the user's."""
    return "" if config.entry is None else f" of {config.entry}"


def dump(config: Config) -> str:
    """Return `config` as YAML, without the keys that are at their defaults; `load` makes an equal one of it.

    Raises:
        ConfigError: It contains a secret, which the message does not show: many people read a rendered file.
    """
    if public(config).lighthouse != config.lighthouse:
        allowed = (
            "URLs without one; set FT_HSDP_ETCD_USER and FT_HSDP_ETCD_PASSWORD in the lighthouse's environment"
        )
        raise ConfigError("lighthouse.etcd", "a password", allowed)
    for i, alert in enumerate(config.alerts):
        if alert.url is not None:
            allowed = "null: name a command that finds the URL where the lighthouse runs, such as in a Secret"
            raise ConfigError(f"alerts.{i}.url", WEBHOOK, allowed)
    for name in config.ray.runtime_env.get("env_vars") or ():
        if _SECRET.search(str(name)):
            raise ConfigError("ray.runtime_env", str(name), "no secrets: give them to the pods in a Secret")
    keys = config.model_dump(exclude_defaults=True)
    for section, key, value, why in (
        ("network", "host", "0.0.0.0", "a replica listens at the address from which it reaches the lighthouse"),
        ("timeouts", "reach_s", REACH_S, "the parts of the job start when there is room for them"),
    ):
        if keys.get(section, {}).get(key) == value:
            keys[section] = {**note(why), **keys[section]}
    return document(keys) or "{}\n"


_COMMENT = re.compile(r"(?m)^( *(?:- )?)'(# .*)': null$")


class _Dumper(YamlDumper):
    """Writes texts of several lines as blocks, and nothing by reference; to some readers y is a truth value."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))


def document(value: Mapping[str, Any]) -> str:
    """Return `value` as a YAML document, keys in their order, with a newline at the end; "" if it is empty."""
    if not value:
        return ""
    text: str = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    return _COMMENT.sub(lambda found: found[1] + found[2].replace("''", "'"), text)


def comment(text: str) -> str:
    """Return `text` as lines of a comment."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def note(text: str) -> dict[str, None]:
    """Return a comment as keys of a mapping: `document` writes it before the next key."""
    return dict.fromkeys(comment(text).splitlines())
