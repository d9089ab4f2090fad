"""Configuration: YAML and dotted overrides into frozen, checked models.

Defaults < YAML < command line; no environment variable changes a value. Every failure is one
`ConfigError` line that names the key, the value and what is allowed.
"""

from ft_hsdp.config.chaos import ChaosConfig, DebugConfig, FailpointConfig
from ft_hsdp.config.config import Config
from ft_hsdp.config.loader import agreed, config_hash, dump, json_schema, load, parse, resume_hash
from ft_hsdp.config.network import LighthouseConfig, NetworkConfig, RayConfig
from ft_hsdp.config.running import (
    CheckpointConfig,
    FtarConfig,
    JobConfig,
    QuorumConfig,
    StateConfig,
)
from ft_hsdp.config.timeouts import RestartConfig, TimeoutsConfig
from ft_hsdp.config.training import DataConfig, LrConfig, ModelConfig, OptimConfig, TrainConfig

__all__ = [
    "ChaosConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "FailpointConfig",
    "FtarConfig",
    "JobConfig",
    "LighthouseConfig",
    "LrConfig",
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
    "resume_hash",
]
