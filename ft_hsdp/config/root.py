"""The whole configuration, and the checks that span sections."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict, JsonValue

from ft_hsdp import faults
from ft_hsdp.config import cluster, hosting, running, training, waits
from ft_hsdp.config.base import Int, Section, refuse
from ft_hsdp.config.chaos import ChaosConfig, DebugConfig


def _having(section: str, key: str, value: JsonValue) -> JsonDict:
    """The schema of a configuration that says `section.key: value`."""
    there: JsonDict = {"required": [key], "properties": {key: {"const": value}}}
    return {"required": [section], "properties": {section: there}}


_ON_GPUS = _having("train", "device", "cuda")


class Config(Section):
    """One job. Made by `ft_hsdp.config.load`; frozen; every key has a default."""

    model_config = ConfigDict(json_schema_extra={"if": _having("optim", "offload", True), "then": _ON_GPUS})

    job: running.JobConfig = Field(default_factory=running.JobConfig)
    replicas: Int = Field(3, ge=1, le=running.MAX_REPLICAS, description="replicas, each with a whole model")
    ranks_per_replica: Int = Field(
        2, ge=1, le=running.MAX_RANKS, description="ranks over which a replica shards its model"
    )
    max_replicas: Int | None = Field(
        None,
        ge=1,
        le=running.MAX_REPLICAS,
        description="up to which `scale` may grow the job; null: replicas. There are as many data shards",
    )
    spares: Int = Field(
        0,
        ge=0,
        le=running.MAX_REPLICAS * running.MAX_RANKS,
        description="warm processes in reserve, a multiple of ranks_per_replica: a lost replica is replaced as a "
        "whole; each holds a model",
    )
    train: training.TrainConfig = Field(default_factory=training.TrainConfig)
    model: training.ModelConfig = Field(default_factory=training.ModelConfig)
    data: training.DataConfig = Field(default_factory=training.DataConfig)
    optim: training.OptimConfig = Field(default_factory=training.OptimConfig)
    lr: training.LrConfig = Field(default_factory=training.LrConfig)
    ftar: running.FtarConfig = Field(default_factory=running.FtarConfig)
    quorum: running.QuorumConfig = Field(default_factory=running.QuorumConfig)
    timeouts: waits.TimeoutsConfig = Field(default_factory=waits.TimeoutsConfig)
    restart: waits.RestartConfig = Field(default_factory=waits.RestartConfig)
    network: hosting.NetworkConfig = Field(default_factory=hosting.NetworkConfig)
    lighthouse: hosting.LighthouseConfig = Field(default_factory=hosting.LighthouseConfig)
    ray: cluster.RayConfig = Field(default_factory=cluster.RayConfig)
    state: running.StateConfig = Field(default_factory=running.StateConfig)
    checkpoint: running.CheckpointConfig = Field(default_factory=running.CheckpointConfig)
    chaos: tuple[ChaosConfig, ...] = Field((), description="failures to inject")
    debug: DebugConfig = Field(default_factory=DebugConfig)

    @property
    def slots(self) -> int:
        """How many replicas there can be; their ids are below it."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def takes_faults(self) -> bool:
        """Whether its processes listen for faults that they have to carry out themselves."""
        return self.debug.faults or any(rule.kind in faults.HOOKED for rule in self.chaos)

    @model_validator(mode="after")
    def _check(self) -> Self:
        wrong = waits.refusal(self)
        if wrong is not None:
            raise wrong
        if self.slots < self.replicas:
            raise refuse("max_replicas", self.max_replicas, f"at least replicas ({self.replicas}), or null")
        if self.spares % self.ranks_per_replica:
            allowed = (
                f"a multiple of ranks_per_replica ({self.ranks_per_replica}): a replica is replaced as a whole"
            )
            raise refuse("spares", self.spares, allowed)
        if self.network.tls == "on" and self.ftar.transport == "c10d":
            raise refuse("ftar.transport", "c10d", "another one with network.tls on: gloo does not encrypt")
        if self.optim.offload and self.train.device == "cpu":
            raise refuse("optim.offload", True, "false with train.device cpu: all is in host memory there")
        if self.quorum.min_replicas > self.replicas:
            raise refuse("quorum.min_replicas", self.quorum.min_replicas, f"at most replicas ({self.replicas})")
        for i, rule in enumerate(self.chaos):
            ends = [] if rule.edge is None else [end for end in rule.edge if end != "lighthouse"]
            if any(r >= self.slots for r in (*rule.replicas, *ends) if isinstance(r, int)):
                raise refuse(
                    f"chaos.{i}.{'edge' if ends else 'replicas'}",
                    list(rule.edge or rule.replicas),
                    f"ids from 0 to {self.slots - 1} (there are {self.slots} replicas at most)",
                )
            if rule.rank is not None and rule.rank >= self.ranks_per_replica:
                raise refuse(
                    f"chaos.{i}.rank",
                    rule.rank,
                    f"0 to {self.ranks_per_replica - 1} (ranks_per_replica is {self.ranks_per_replica})",
                )
        return self
