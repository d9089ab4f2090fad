"""The configuration that a rendered file carries: the user's, fit for pieces that start on several machines."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from ft_hsdp.config import Config, NetworkConfig, TimeoutsConfig
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.render.text import Note, document

REACH_S = 300.0  # pieces wait in a queue, one by one
FOLDER = "/runs"  # where pods have the run directory
COMMAND = ("-m", "ft_hsdp.launch.cli")
_SECRET = re.compile("token|secret|passw|credential|key$", re.IGNORECASE)


def spread(config: Config, **job: str) -> Config:
    """`config` for several machines: what stands at its default for one is changed. job: keys of that section.

    Raises ConfigError for what nobody would keep running there.
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
            raise ConfigError("lighthouse.ha.etcd", "a password", allowed)
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
            said[section][key] = Note(why, value)
    return said
