"""The sections that say how the job runs: all-reduce, quorum, restarts, network, failures."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from ft_hsdp.config.base import DAY_S, Int, Number, Section, refuse
from ft_hsdp.failpoints import PLACES

MAX_REPLICAS = 64
MAX_RANKS = 64

ReplicaId = Annotated[Int, Field(ge=0, lt=MAX_REPLICAS)]


class JobConfig(Section):
    """The job's name and the place of its files."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="names the folder of the run",
        json_schema_extra={"not": {"enum": [".", ".."]}},
    )
    runs_dir: str = Field("runs", min_length=1, description="folder that holds a folder per run")

    @model_validator(mode="after")
    def _folder(self) -> Self:
        if self.name in (".", ".."):
            raise refuse("name", self.name, "a name that is not a folder's own name for itself or its parent")
        return self


class FtarConfig(Section):
    """The all-reduce across replicas (FT-HSDP §5)."""

    transport: Literal["auto", "tcp", "shm", "c10d"] = Field(
        "auto", description="how ranks of a ring are connected"
    )
    chunk_bytes: Int | None = Field(
        None,
        ge=4096,
        le=2**30,
        multiple_of=64,
        description="S: bytes of a chunk; null: 1 to 8 MiB, by the size of the message",
    )
    chunks: Int = Field(
        8, ge=1, le=1024, description="C: chunks on their way to a neighbour at once (at most S x C bytes)"
    )
    connections: Int = Field(1, ge=1, le=64, description="K: TCP connections to a neighbour, for long links")
    timeout_s: Number = Field(
        60.0,
        gt=0,
        le=DAY_S,
        description="longest wait for a neighbour that lives: who does not reduce for so long is started again",
    )
    dtype: Literal["float32"] = Field("float32", description="type in which gradients are summed")


class QuorumConfig(Section):
    """When the lighthouse goes on without a replica (FT-HSDP §4.1)."""

    min_replicas: Int = Field(1, ge=1, le=MAX_REPLICAS, description="contributors below which training waits")
    lease_s: Number = Field(
        600.0, gt=0, le=DAY_S, description="how long the last grant holds without a lighthouse"
    )
    catchup_wait_s: Number = Field(
        0.0,
        ge=0,
        le=DAY_S,
        description="how long a step waits, once, for a replica that fetches; 0: nobody waits, it joins later",
    )
    catchup_log_steps: Int = Field(
        64,
        ge=1,
        le=65536,
        description="committed gradients that a replica keeps while it fetches; after more it fetches anew",
    )
    on_lost_head: Literal["wait", "halt", "rollback"] = Field(
        "halt",
        description="what to do when every holder of the newest committed state has exited: wait for an operator, "
        "end the job with 75, or go back to the newest state that is left (initial weights, if nothing is); one "
        "step alone is always given up",
    )


class StateConfig(Section):
    """Copies of committed states in host memory, from which replicas that are behind catch up."""

    snapshot: Literal["on_demand", "every_step"] = Field(
        "every_step",
        description="every_step: each committed state is copied, so that it outlives its ranks; on_demand: only "
        "those that a replica fetches (FT-HSDP §4.4)",
    )


class CheckpointConfig(Section):
    """Durable checkpoints."""

    every: Int = Field(0, ge=0, le=10**9, description="steps between durable checkpoints; 0 makes none")
    dir: str | None = Field(
        None,
        min_length=1,
        description="folder of the checkpoints: a job that finds one there resumes from it; null means "
        "checkpoints in the folder of the run",
    )
    keep: Int = Field(2, ge=1, le=10**6, description="checkpoints that are kept")


def _given(one: str, other: str) -> JsonDict:
    """The schema of a mapping that has a value at `one`, and none at `other`."""
    value: JsonDict = {"not": {"type": "null"}}
    return {"required": [one], "properties": {one: value, other: {"type": "null"}}}


class ChaosConfig(Section):
    """Failures injected on purpose: once at a step, or at a rate."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [_given("at_step", "rate_per_min"), _given("rate_per_min", "at_step")],
            "if": {"properties": {"for_s": {"exclusiveMinimum": 0}}, "required": ["for_s"]},
            "then": {"properties": {"signal": {"const": "STOP"}}, "required": ["signal"]},
        }
    )

    at_step: Int | None = Field(None, ge=1, le=10**9, description="once, while this step is in flight")
    rate_per_min: Number | None = Field(None, gt=0, le=6000, description="at random moments, this often a minute")
    replicas: tuple[ReplicaId, ...] = Field(
        min_length=1, description="ids of the replicas that are hit", json_schema_extra={"uniqueItems": True}
    )
    rank: Annotated[Int, Field(ge=0, lt=MAX_RANKS)] | None = Field(
        None,
        description="rank that gets the signal; null means rank 0 with at_step, a random one with a rate",
    )
    signal: Literal["KILL", "STOP", "TERM"] = Field("KILL", description="the signal")
    down_steps: Int = Field(
        0, ge=0, le=10**6, description="steps that a lost replica stays away before its restart"
    )
    for_s: Number = Field(
        0.0, ge=0, le=DAY_S, description="with STOP: continue after this many seconds; 0 never does"
    )
    seed: Int = Field(0, ge=0, lt=2**63, description="seed of the random moments and victims of a rate")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.at_step is None and self.rate_per_min is None:
            raise refuse("at_step", None, "exactly one of at_step and rate_per_min (neither is given)")
        if self.at_step is not None and self.rate_per_min is not None:
            raise refuse(
                "rate_per_min", self.rate_per_min, "exactly one of at_step and rate_per_min (both are given)"
            )
        if self.for_s > 0 and self.signal != "STOP":
            raise refuse("for_s", self.for_s, f"0 with signal {self.signal}: only a STOP can be continued")
        if len(set(self.replicas)) != len(self.replicas):
            raise refuse("replicas", list(self.replicas), "each replica once")
        return self


class FailpointConfig(Section):
    """Who fails at a named place of the code, and when."""

    replicas: tuple[ReplicaId, ...] = Field(min_length=1, description="ids of the replicas that fail there")
    rank: Int = Field(0, ge=0, lt=MAX_RANKS, description="the rank that fails there")
    life: Int = Field(0, ge=0, le=10**6, description="in which incarnation: the number of restarts before it")
    step: Int = Field(ge=0, le=10**9, description="at this step, or the first time after it")
    signal: Literal["KILL", "STOP"] = Field("KILL", description="the signal that it sends itself")


class DebugConfig(Section):
    """For tests."""

    failpoints: dict[str, FailpointConfig] = Field(
        {},
        description="named places in the code at which to fail (see docs/protocol.md)",
        json_schema_extra={"propertyNames": {"enum": [*PLACES]}},
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.failpoints:
            if name not in PLACES:
                raise refuse(f"failpoints.{name}", name, f"one of {', '.join(PLACES)}")
        return self
