"""The configuration of a job: YAML and dotted overrides, checked and frozen.

Defaults are overridden by the YAML file, and that by the command line; no environment variable changes a value.
Every mistake is reported as one `ConfigError` line that names the key, the value and what is allowed.

Read the modules in this order:

- `base`: `Section`, the base of all models, and the types of numbers, with their own bounds.
- `config`: `Config`, one field per section, and the checks between sections (`BOUNDS`).
- `training`, `running`, `network`, `timeouts`, `chaos`: the sections. The `description` of each key goes into
  configs/schema.json (``launcher.py schema > configs/schema.json``), and from there into editors and the site.
- `loader`: `load` and `dump`; and `config_hash`, which all replicas of a job must have in common.
- `entry`: the file behind the key `entry`, and its digest.
- `explain`: turns a validation error into the one line.

This package imports `ft_hsdp.core`, `ft_hsdp.errors` and `ft_hsdp.fault_injection` at most, and no torch, so that
every process can read a configuration.

Example:

    config = load(Path("configs/quickstart.yaml"), ["--train.steps=60"])
    config.timeouts.silence_s  # 0.5
    load(path, ["--train.step=60"])  # ConfigError: there is no such key; did you mean train.steps?
"""

from ft_hsdp.config.chaos import ChaosConfig, DebugConfig, FailpointConfig
from ft_hsdp.config.config import Config
from ft_hsdp.config.loader import agreed, config_hash, dump, json_schema, load, parse, public, resume_hash
from ft_hsdp.config.network import AlertConfig, LighthouseConfig, NetworkConfig, RayConfig
from ft_hsdp.config.running import (
    CheckpointConfig,
    FtarConfig,
    HostsConfig,
    JobConfig,
    MemoryConfig,
    QuorumConfig,
    StateConfig,
)
from ft_hsdp.config.timeouts import RestartConfig, TimeoutsConfig
from ft_hsdp.config.training import DataConfig, LrConfig, ModelConfig, OptimConfig, TrainConfig

__all__ = [
    "AlertConfig",
    "ChaosConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "FailpointConfig",
    "FtarConfig",
    "HostsConfig",
    "JobConfig",
    "LighthouseConfig",
    "LrConfig",
    "MemoryConfig",
    "ModelConfig",
    "NetworkConfig",
    "OptimConfig",
    "QuorumConfig",
    "RayConfig",
    "RestartConfig",
    "StateConfig",
    "TimeoutsConfig",
    "TrainConfig",
    "agreed",
    "config_hash",
    "dump",
    "json_schema",
    "load",
    "parse",
    "public",
    "resume_hash",
]
