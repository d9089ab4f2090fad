"""The whole configuration, and the checks that span sections."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ft_hsdp.config import running, training
from ft_hsdp.config.base import Int, Section, refuse


class Config(Section):
    """One job. Made by `ft_hsdp.config.load`; frozen; every key has a default."""

    job: running.JobConfig = Field(default_factory=running.JobConfig)
    replicas: Int = Field(3, ge=1, le=running.MAX_REPLICAS, description="replicas, each with a whole model")
    ranks_per_replica: Int = Field(
        2, ge=1, le=running.MAX_RANKS, description="ranks over which a replica shards its model"
    )
    train: training.TrainConfig = Field(default_factory=training.TrainConfig)
    model: training.ModelConfig = Field(default_factory=training.ModelConfig)
    data: training.DataConfig = Field(default_factory=training.DataConfig)
    optim: training.OptimConfig = Field(default_factory=training.OptimConfig)
    lr: training.LrConfig = Field(default_factory=training.LrConfig)
    ftar: running.FtarConfig = Field(default_factory=running.FtarConfig)
    quorum: running.QuorumConfig = Field(default_factory=running.QuorumConfig)
    restart: running.RestartConfig = Field(default_factory=running.RestartConfig)
    network: running.NetworkConfig = Field(default_factory=running.NetworkConfig)
    state: running.StateConfig = Field(default_factory=running.StateConfig)
    checkpoint: running.CheckpointConfig = Field(default_factory=running.CheckpointConfig)
    chaos: tuple[running.ChaosConfig, ...] = Field((), description="failures to inject")
    debug: running.DebugConfig = Field(default_factory=running.DebugConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quorum.catchup_wait_s >= self.ftar.timeout_s:
            raise refuse(
                "quorum.catchup_wait_s",
                self.quorum.catchup_wait_s,
                f"less than ftar.timeout_s ({self.ftar.timeout_s}): the others would give up the ring meanwhile",
            )
        if self.optim.offload and self.train.device == "cpu":
            raise refuse("optim.offload", True, "false with train.device cpu: all is in host memory there")
        if self.quorum.min_replicas > self.replicas:
            raise refuse("quorum.min_replicas", self.quorum.min_replicas, f"at most replicas ({self.replicas})")
        for i, rule in enumerate(self.chaos):
            strangers = [r for r in rule.replicas if r >= self.replicas]
            if strangers:
                raise refuse(
                    f"chaos.{i}.replicas",
                    list(rule.replicas),
                    f"ids from 0 to {self.replicas - 1} (replicas is {self.replicas})",
                )
            if rule.rank is not None and rule.rank >= self.ranks_per_replica:
                raise refuse(
                    f"chaos.{i}.rank",
                    rule.rank,
                    f"0 to {self.ranks_per_replica - 1} (ranks_per_replica is {self.ranks_per_replica})",
                )
        return self
