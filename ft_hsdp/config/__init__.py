"""Configuration: YAML and dotted overrides into frozen, checked models.

Defaults < YAML < command line; no environment variable changes a value. Every failure is one
`ConfigError` line that names the key, the value and what is allowed.
"""

from ft_hsdp.config.files import config_hash, dump, json_schema, load, parse
from ft_hsdp.config.root import Config
from ft_hsdp.config.running import (
    ChaosConfig,
    CheckpointConfig,
    DebugConfig,
    FtarConfig,
    JobConfig,
    NetworkConfig,
    QuorumConfig,
    RestartConfig,
)
from ft_hsdp.config.training import DataConfig, LrConfig, ModelConfig, OptimConfig, TrainConfig

__all__ = [
    "ChaosConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "FtarConfig",
    "JobConfig",
    "LrConfig",
    "ModelConfig",
    "NetworkConfig",
    "OptimConfig",
    "QuorumConfig",
    "RestartConfig",
    "TrainConfig",
    "config_hash",
    "dump",
    "json_schema",
    "load",
    "parse",
]
