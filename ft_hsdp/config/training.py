"""The sections on what is trained: batches, model, data, optimizer, learning rate."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ft_hsdp.config.base import Int, Number, PathText, Section, refuse

Beta = Annotated[Number, Field(ge=0, lt=1)]


class TrainConfig(Section):
    """Length, batches and precision of training."""

    steps: Int = Field(100, ge=1, le=10**9, description="committed steps until the job is done")
    seed: Int = Field(0, ge=0, lt=2**63, description="seed of the initial weights and of the order of the data")
    micro_batch: Int = Field(4, ge=1, le=65536, description="sequences per rank and micro-batch")
    seq_len: Int = Field(128, ge=8, le=2**20, description="tokens per sequence")
    accumulate: Int = Field(1, ge=1, le=65536, description="micro-batches per step and rank")
    threads: Int = Field(1, ge=1, le=1024, description="torch threads per rank; results depend on it")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type of forward and backward; parameters' shards, sums and optimizer state stay float32",
    )
    poison: Literal["exclude_contributor", "skip_step"] = Field(
        "exclude_contributor",
        description="a gradient that is not finite: reduce again without it, or commit the step without a change",
    )
    norm_mads: Number | None = Field(
        None,
        ge=2,
        le=1e6,
        description="a gradient whose norm is more median absolute deviations than that from the median of three "
        "or more contributors is treated like one that is not finite; null: norms are not compared",
    )
    recompute: bool = Field(
        False, description="keep a block's input only and run its forward again in backward, to save memory"
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="where ranks compute; cuda: each rank on the GPU of its number on the machine"
    )
    deterministic: bool = Field(
        False,
        description="only operators that give the same bits each time: slower, and without flash attention",
    )


class ModelConfig(Section):
    """The model, a Llama-style transformer."""

    dim: Int = Field(192, ge=2, le=65536, description="width of the residual stream")
    layers: Int = Field(6, ge=1, le=1024, description="transformer blocks")
    heads: Int = Field(6, ge=1, le=1024, description="query heads; must divide dim")
    kv_heads: Int | None = Field(
        None, ge=1, le=1024, description="key and value heads; null means as many as heads"
    )
    ffn_dim: Int | None = Field(
        None, ge=1, le=10**6, description="hidden width of SwiGLU; null derives it from dim"
    )
    rope_theta: Number = Field(10000.0, gt=1, description="base of the rotary position embedding")
    norm_eps: Number = Field(1e-5, gt=0, lt=1, description="epsilon of RMSNorm")

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.dim % self.heads:
            raise refuse("dim", self.dim, f"a multiple of model.heads ({self.heads})")
        if (self.dim // self.heads) % 2:
            raise refuse(
                "dim",
                self.dim,
                f"an even width per head (dim / heads is {self.dim // self.heads}; rotary needs pairs)",
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise refuse("kv_heads", self.kv_heads, f"a divisor of model.heads ({self.heads})")
        return self

    @property
    def key_value_heads(self) -> int:
        """`kv_heads`, or its default."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_dim(self) -> int:
        """`ffn_dim`, or its default: 8/3 of dim, rounded up to a multiple of 32."""
        return -(-8 * self.dim // (3 * 32)) * 32 if self.ffn_dim is None else self.ffn_dim


VOCABULARY = {"byte": 257}
"""Number of tokens, by tokenizer."""


class DataConfig(Section):
    """Where the text comes from."""

    path: PathText = Field(
        "stdlib",
        description="a file or folder of text, JSONL (field text) or Parquet (column text); "
        "stdlib means the Python sources of the interpreter's standard library",
    )
    tokenizer: Literal["byte"] = Field("byte", description="byte: one token per byte, and one between documents")
    assignment: Literal["per_replica", "global"] = Field(
        "per_replica",
        description="per_replica: each replica trains a data shard of its own; global: all take from one "
        "sequence, and what a lost replica had taken is trained by the others",
    )
    weight: Literal["units", "tokens"] = Field(
        "units",
        description="what counts alike in the mean of a step: units (one rank's micro-batches), or tokens, whose "
        "number may differ between units",
    )
    max_bytes: Int = Field(64 * 2**20, ge=1, le=2**40, description="bytes of text that are read at most")
    check: bool | Literal["auto"] = Field(
        "auto",
        description="whether a few samples are read at the start, and compared between replicas and with the "
        "checkpoint: auto, those with an index; true, also the first of a stream; false, none",
    )
    resume: Literal["same", "other"] = Field(
        "same",
        description="data of a job that resumes: same, those of the checkpoint; other, maybe others, which are "
        "read from the beginning",
    )

    @property
    def vocabulary(self) -> int:
        """How many different tokens there are."""
        return VOCABULARY[self.tokenizer]


class EvalConfig(Section):
    """Evaluation inside the job."""

    every: Int = Field(0, ge=0, le=10**9, description="evaluate each so many steps, and the last one; 0: never")
    batches: Int = Field(
        16, ge=1, le=65536, description="batches of train.micro_batch sequences; each replica computes them all"
    )
    data: PathText | None = Field(
        None, description="text that is not trained, as data.path; null: an entry has data of its own"
    )


class OptimConfig(Section):
    """The optimizer, which is AdamW."""

    lr: Number = Field(1e-3, gt=0, le=10, description="learning rate before schedule and intervention")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay of the first and second moment")
    eps: Number = Field(1e-8, gt=0, lt=1, description="added to the root of the second moment")
    weight_decay: Number = Field(0.1, ge=0, le=10, description="decoupled weight decay")
    clip: Number | None = Field(1.0, gt=0, description="largest norm of the reduced gradient; null does not clip")
    offload: bool = Field(
        False, description="the optimizer's tensors are in host memory except during the update (FT-HSDP §5)"
    )


class LrConfig(Section):
    """How the learning rate moves."""

    schedule: Literal["constant", "cosine", "linear"] = Field(
        "constant", description="shape of the way from optim.lr down to min_ratio of it, over train.steps"
    )
    warmup: Int = Field(0, ge=0, le=10**9, description="steps of linear rise before the schedule")
    min_ratio: Number = Field(0.1, ge=0, le=1, description="end of the schedule, as a part of optim.lr")
    intervention: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="scale of the learning rate by units / wanted units while replicas are away (FT-HSDP §6.2)",
    )
