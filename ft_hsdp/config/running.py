"""The sections on how the job runs: its files, all-reduce, quorum, snapshots, checkpoints."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ft_hsdp.config.base import Int, PathText, PositiveNumber, PositiveSeconds, Seconds, Section, refuse
from ft_hsdp.memory.hosts import LABEL

MAX_REPLICAS = 64
MAX_RANKS = 64

ReplicaId = Annotated[Int, Field(ge=0, lt=MAX_REPLICAS)]


class JobConfig(Section):
    """The job's name and the place of its files."""

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="names the folder of the run",
    )
    runs_dir: PathText = Field("runs", description="folder that holds a folder per run")

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
    timeout_s: PositiveSeconds = Field(
        60.0,
        description="longest wait for a neighbour that lives; a replica that does not reduce for so long is "
        "started again",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type in which gradients travel; a member adds in float32, and sends a rounded sum on",
    )


class QuorumConfig(Section):
    """When the lighthouse goes on without a replica (FT-HSDP §4.1)."""

    min_replicas: Int = Field(
        1,
        ge=1,
        le=MAX_REPLICAS,
        description="with fewer contributors training waits; replicas that are behind fetch the newest state "
        "meanwhile",
    )
    lease_s: PositiveSeconds = Field(600.0, description="how long the last grant holds without a lighthouse")
    catchup_wait_s: Seconds = Field(
        0.0,
        description="how long a step waits, once, for a replica that fetches; 0: no step waits, it joins later",
    )
    catchup_log_bytes: Int = Field(
        16 * 2**30,
        ge=1,
        le=2**50,
        description="host memory in which a rank keeps the sums of up to 64 committed steps, and of one at least, "
        "while its replica fetches; after more it fetches anew",
    )
    on_divergence: Literal["halt", "checkpoint"] = Field(
        "halt",
        description="what to do when replicas hold different states and no majority says which is right: end the "
        "job with 75, or let all begin again from the newest checkpoint",
    )
    on_culprit: Literal["tell", "evict"] = Field(
        "tell",
        description="what to do when the diagnosis names a rank that keeps all others waiting: only tell; or have "
        "its replica killed and started again, if ranks of two other replicas confirm it and quorum.min_replicas "
        "are left, once in ten minutes; then a pause of seconds that is no job.pause counts as a hang",
    )
    on_straggler: Literal["tell", "demote"] = Field(
        "tell",
        description="what to do when a replica works more than twice as long as two others: only tell; or move it "
        "from the host of its slow rank to a spare one, or else have it killed and started again, as on_culprit "
        "does: once in ten minutes, if quorum.min_replicas are left",
    )
    on_lost_head: Literal["wait", "halt", "rollback"] = Field(
        "halt",
        description="what to do when every holder of the newest committed state has exited: wait for an operator, "
        "end the job with 75, or go back to the newest state that is left (initial weights, if nothing is); a "
        "single step is always given up",
    )

    batch: Literal["adapt", "constant"] = Field(
        "adapt",
        description="adapt: a step has fewer units (one rank's micro-batches) while a replica is away; constant: "
        "the others train its units, so that each step has as many as with all replicas",
    )
    refill: Literal["next_step", "same_step"] | None = Field(
        None,
        description="with batch constant, when a replica is lost in the middle of a step: next_step (null means "
        "that) commits the step with what the others hold, same_step has them train what is missing first",
    )
    allowed: tuple[Annotated[Int, Field(ge=1, le=MAX_REPLICAS)], ...] = Field(
        (),
        max_length=MAX_REPLICAS,
        description="numbers of replicas that may contribute to a step; others that are healthy stand by, with "
        "the same state; empty: any number",
    )
    max_accumulate: Int | None = Field(
        None,
        ge=1,
        le=65536,
        description="with batch constant, most micro-batches per step and rank while replicas are away; null: as "
        "many as needed",
    )


Domains = Annotated[str, Field(pattern=f"^{LABEL}$")]
"""Where a host stands: "zone/rack", "rack" or "zone/"."""


class HostsConfig(Section):
    """The hosts on which ranks run: what is lost at once, with all ranks, the state agent and its memory."""

    per_replica: Int | None = Field(
        None,
        ge=1,
        le=MAX_RANKS,
        description="hosts over which the ranks of a replica are spread evenly, each with a state agent: machines "
        "under `host`, emulated ones (r0h0 and so on) under `up` and `replica`; it divides ranks_per_replica; "
        "null: one under `host`, and under `up` if no variable says where this machine stands, else the machines "
        "that there are",
    )
    spare: Int = Field(
        0,
        ge=0,
        le=MAX_RANKS,
        description="spare emulated hosts, s0 and so on, under `up`: one takes the place of a host that is lost; "
        "needs hosts.per_replica",
    )
    check: Seconds = Field(
        0.0,
        description="seconds in which a machine tries its parts before it joins, or is refused, under `host`, "
        "`replica` and `submit`; 0: none",
    )
    labels: dict[str, Domains] = Field(
        {},
        description='where hosts stand: a pattern of names, such as node[0-9]*, and "zone/rack", "rack" or '
        '"zone/"; the first pattern that fits a host counts',
    )


class StateConfig(Section):
    """Copies of committed states in host memory, from which replicas that are behind catch up."""

    snapshot: Literal["on_demand", "every_step"] = Field(
        "every_step",
        description="every_step: each committed state is copied, so that it outlives its ranks; on_demand: only "
        "those that a replica fetches (FT-HSDP §4.4)",
    )


class MemoryConfig(Section):
    """Copies of states in the memory of several hosts, so that no lost host takes a state with it."""

    copies: Int | None = Field(
        None,
        ge=1,
        le=8,
        description="on how many hosts each shard of the newest state is; healthy replicas count, and only what "
        "is missing is copied; null: 2, or 1 while there are no hosts apart",
    )
    apart: Literal["host", "rack", "zone"] = Field(
        "host", description="what two copies of a shard do not share: what may be lost at once"
    )
    every: Int = Field(
        1,
        ge=1,
        le=10**6,
        description="copies are made of every k-th state; a lost host may cost k steps",
    )
    wait_s: Seconds | None = Field(
        None,
        description="how long a step waits at most for the copies of the state before it; 0: no step waits; null: "
        "2 s, and 1 s for each GB that a host copies",
    )
    budget_gb: PositiveNumber | None = Field(
        None,
        description="GB of memory that each host gives to copies for other hosts, two of each shard, and to "
        "blocks of static data; null: no limit",
    )
    shrink_to: Int | None = Field(
        None,
        ge=1,
        le=MAX_RANKS,
        description="a replica that gets no host for lost ones within timeouts.place_s goes on with the ranks "
        "that are left, if there are so many; it grows again when there is a host; null: it waits",
    )

    @property
    def budget(self) -> int | None:
        """Bytes that a host gives to others; None: no limit."""
        return None if self.budget_gb is None else int(self.budget_gb * 1e9)


class CheckpointConfig(Section):
    """When and where durable checkpoints are written."""

    every: Int = Field(0, ge=0, le=10**9, description="steps between durable checkpoints; 0: as every_s says")
    every_s: Seconds = Field(
        600.0,
        description="while `every` is 0 and there is a `dir`: longest time between two durable checkpoints; 0 "
        "makes none but the last one",
    )
    dir: PathText | None = Field(
        None,
        description="folder of the checkpoints: a job that finds one there resumes from it; null means "
        "checkpoints in the folder of the run",
    )
    keep: Int = Field(2, ge=1, le=10**6, description="checkpoints that are kept")
    key: PathText | None = Field(
        None,
        description="file of the secret that signs checkpoints, made if it is missing; null means "
        "~/.local/state/ft_hsdp/checkpoint.key; FT_HSDP_CHECKPOINT_KEY replaces it",
    )
    trust: bool = Field(
        False,
        description="resume also from a checkpoint without a signature or with that of another key: every "
        "process that can write the folder then decides what is loaded",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.key is not None and self.dir is not None and PurePath(self.key).is_relative_to(self.dir):
            raise refuse(
                "key",
                self.key,
                "a file outside checkpoint.dir: with it there, write access to the folder would be enough to sign",
            )
        return self
