"""What users train, a case each: the model, how it is sharded, its optimizers, its loss and its batches.

`script.py` trains them in a job of 2 replicas x 2 ranks, and `plain.py` with torch alone; the weights must agree.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, Adagrad, AdamW, Muon, NAdam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

from tests.compatibility.models import (
    VOCABULARY,
    Block,
    Convolutional,
    Decoder,
    LowRank,
    WithLoss,
    next_token_loss,
)
from tests.support.state import parallel_models

STEPS, ROWS, PAD = 6, 2, -100
# The gradient of an attention's key bias is zero but for rounding, which Adam would divide by itself.
EPS = 1e-3


def tokens(unit: int) -> Tensor:
    """The batch of a unit: random tokens, int64 [rows, length]."""
    return torch.randint(VOCABULARY, (ROWS, 8), generator=torch.Generator().manual_seed(1000 + unit))


def padded(unit: int) -> tuple[Tensor, Tensor]:
    """Tokens, and targets of which a number that depends on the unit does not count."""
    batch = tokens(unit)
    targets = batch.clone()
    targets[:, 2 + unit % 5 :] = PAD
    return batch, targets


def padded_or_empty(unit: int) -> tuple[Tensor, Tensor]:
    """The same, and of some units no target counts: their loss is 0/0."""
    batch, targets = padded(unit)
    return batch, targets if unit % 5 else torch.full_like(targets, PAD)


def packed(unit: int) -> tuple[Tensor, Tensor]:
    """Two documents in one row, which is longer in some units; no target is in another document than its token."""
    length = 6 + unit % 5
    batch = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1000 + unit))
    targets = batch.clone()
    targets[:, length // 2] = PAD
    return batch, targets


# How that user shards the model.


def each_block(model: Any, mesh: DeviceMesh, **options: Any) -> None:
    """Each block for itself, then the rest: what the tutorials of torch do."""
    for block in model.blocks():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def tail_as_a_list(model: Any, mesh: DeviceMesh) -> None:
    """As torchtitan and accelerate do."""
    for block in model.blocks():
        fully_shard(block, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def tied_list(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks():
        fully_shard(block, mesh=mesh)
    fully_shard([model.embed, model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def experts_inside_blocks(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks():
        for expert in block.ffn.experts:
            fully_shard(expert, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def kept_gathered(model: Any, mesh: DeviceMesh) -> None:
    each_block(model, mesh, reshard_after_forward=False)


def in_bf16(model: Any, mesh: DeviceMesh) -> None:
    each_block(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def reduced_in_fp32(model: Any, mesh: DeviceMesh) -> None:
    each_block(model, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))


def tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    parallel_models.tensor_parallel(model, parallel_models.mesh_of(mesh.size(), 2, ("dp", "tp")))


def tensor_parallel_in_part(model: Any, mesh: DeviceMesh) -> None:
    tp = parallel_models.mesh_of(mesh.size(), 2, ("dp", "tp"))
    parallel_models.tensor_parallel(model, tp, sequence=False)


def expert_parallel(model: Any, mesh: DeviceMesh) -> None:
    parallel_models.expert_parallel(model, parallel_models.mesh_of(mesh.size(), 2, ("efsdp", "ep")))


def with_lora() -> Decoder:
    model = Decoder().requires_grad_(False)
    for block in model.blocks():
        assert isinstance(block, Block)
        block.qkv = LowRank(block.qkv)  # type: ignore[assignment]
    return model


def frozen_embedding() -> Decoder:
    model = Decoder()
    model.embed.requires_grad_(False)
    return model


def frozen_bias() -> Decoder:
    """Some parameters of each block are frozen, the others are not."""
    model = Decoder()
    for name, param in model.named_parameters():
        param.requires_grad_("bias" not in name)
    return model


def unused_layer() -> Decoder:
    model = Decoder()
    model.never = nn.Linear(4, 4)
    return model


def recomputed() -> Decoder:
    model = Decoder()
    model.layers = nn.ModuleList(checkpoint_wrapper(block) for block in model.layers)
    return model


def compiled() -> Decoder:
    model = Decoder()
    for block in model.blocks():
        block.compile(backend="aot_eager")
    return model


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(trainable(model), lr=1e-2, eps=EPS)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def muon_and_adamw(model: Any) -> list[Optimizer]:
    """Muon iterates in bf16, which amplifies the rounding of directions without a gradient."""
    matrices = [p for block in model.blocks() for p in block.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [Muon(matrices, lr=1e-2), AdamW(rest, lr=1e-2, eps=EPS)]


def groups(model: nn.Module) -> Optimizer:
    """Weight decay for matrices alone, and a rate of its own for each group."""
    params = trainable(model)
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-2}], lr=1e-2, eps=EPS)


def linear_warmup(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def one_cycle(optimizer: Any) -> Any:
    """It changes the momentum, too."""
    return OneCycleLR(optimizer, max_lr=2e-2, total_steps=STEPS + 1)


def warmup_then_cosine(optimizer: Any) -> Any:
    warm = LambdaLR(optimizer, lambda step: (step + 1) / 3)
    return SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, T_max=4)], milestones=[2])


def clipped_groups(model: nn.Module) -> Optimizer:
    """Each group is clipped by a norm of its own; that of the last one is not reached."""
    params = trainable(model)
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    given = [{"params": matrices, "clip": 0.1}, {"params": vectors, "clip": 50.0}]
    return SGD(given, lr=0.5, momentum=0.9)


def pretrained() -> dict[str, Tensor]:
    """The weights of another seed, as a file has them."""
    before = torch.get_rng_state()
    torch.manual_seed(7)
    weights = Decoder().state_dict()
    torch.set_rng_state(before)
    return weights


class Average:
    """An average of the weights, as docs/library.md has it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.mean = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.steps = 0

    def update(self, step: object = None) -> None:
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.mean[name].lerp_(p, 0.25)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {**self.mean, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.mean:
            self.mean[name].copy_(state[name])
        self.steps = state["steps"]


def evaluate(job: Any, model: nn.Module) -> None:
    """Evaluate with another number of random draws than training has."""
    if job.step % 2 == 0:
        with job.pause("evaluation"), torch.no_grad():
            torch.rand(job.step)
            model.eval()
            loss = of_logits(model, tokens(10_000 + job.rank))
            model.train()
        job.log({"eval/loss": loss})


def of_logits(model: nn.Module, batch: Tensor) -> Tensor:
    return next_token_loss(model(batch), batch)


def of_output(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)["loss"]
    return loss


def of_targets(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return next_token_loss(model(batch[0]), batch[1], PAD)


def counted(batch: tuple[Tensor, Tensor]) -> int:
    return int((batch[1][:, 1:] != PAD).sum())


@dataclass(frozen=True)
class Case:
    title: str
    model: Callable[[], nn.Module] = Decoder
    shard: Callable[[Any, DeviceMesh], None] = each_block
    optimizers: Callable[[Any], Any] = adamw
    schedule: Callable[[Any], Any] | None = None
    loss: Callable[[nn.Module, Any], Tensor] = of_logits
    batch: Callable[[int], Any] = tokens
    weigh: Callable[[Any], int] | None = None
    clip: float | None = None
    accumulate: int = 1
    ranks: int = 2  # of a replica
    ranks_per_unit: int = 1
    find_unused: bool = False
    batch_norm: str | None = None
    weights: Callable[[], dict[str, Tensor]] | None = None  # the model begins with, in place of its own
    beside: Callable[[Any, nn.Module], None] | None = None  # what the loop does after each step
    average: bool = False  # it keeps an `Average`
    exported: bool = False  # the weights are those of `launcher.py export`, not of the loop
    compute: torch.dtype | None = None  # of forward and backward, where that is not the parameters' own
    tolerance: float = 2e-6  # largest difference of a weight from plain torch, relative to the largest weight
    settings: dict[str, Any] = field(default_factory=dict)


weighed = partial(Case, loss=of_targets, weigh=counted, settings={"data.weight": "tokens"})


CASES: dict[str, Case] = {
    "plain": Case("a decoder, each block sharded for itself"),
    "root": Case("the root alone is sharded", shard=whole),
    "tied": Case("tied embedding and head, in the root", lambda: Decoder(tied=True)),
    "tied_list": Case("tied embedding and head, in a list", lambda: Decoder(tied=True), tied_list),
    "list": Case("norm and head sharded as one list", shard=tail_as_a_list),
    "module_dict": Case("layers in a ModuleDict", lambda: Decoder(named_layers=True)),
    "moe": Case("experts sharded inside their blocks", lambda: Decoder(experts=3), experts_inside_blocks),
    "lora": Case("LoRA: a frozen model with small trainable matrices", with_lora),
    "frozen_module": Case("a frozen embedding", frozen_embedding),
    "frozen_parameters": Case("frozen and trainable parameters in one module", frozen_bias),
    "unused": Case("a layer that forward does not use", unused_layer, find_unused=True),
    "convolution": Case("convolutions with GroupNorm", Convolutional),
    "kept_gathered": Case("reshard_after_forward=False", shard=kept_gathered),
    "recompute": Case("activation checkpointing of each block", recomputed),
    "compile": Case("torch.compile of each block", compiled),
    "bf16_compute": Case("forward and backward in bf16", shard=in_bf16, compute=torch.bfloat16, tolerance=5e-2),
    "bf16_parameters": Case(
        "parameters in bf16, gradients reduced in fp32",
        lambda: Decoder().bfloat16(),
        reduced_in_fp32,
        lambda model: SGD(model.parameters(), lr=0.5),
        tolerance=2e-2,
    ),
    "dropout": Case("dropout", lambda: Decoder(dropout=0.2)),
    "muon": Case("Muon for matrices, AdamW for the rest", optimizers=muon_and_adamw, tolerance=2e-2),
    "groups": Case("parameter groups with rates and decay of their own", optimizers=groups),
    "nadam": Case("NAdam", optimizers=lambda model: NAdam(model.parameters(), lr=1e-2, eps=EPS)),
    "adagrad": Case(
        "Adagrad with an initial accumulator",
        optimizers=lambda model: Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1, eps=EPS),
    ),
    "lambda_lr": Case("LambdaLR", schedule=linear_warmup),
    "one_cycle": Case("OneCycleLR", schedule=one_cycle),
    "sequential_lr": Case("SequentialLR: a warm-up, then a cosine", schedule=warmup_then_cosine),
    "clip": Case("the norm of the gradient is clipped", clip=0.5),
    "clip_groups": Case(
        "each parameter group is clipped by a norm of its own", optimizers=clipped_groups, tolerance=5e-6
    ),
    "accumulate": Case("three micro-batches a step", accumulate=3),
    "padded": weighed("padded batches, weighed by their tokens", batch=padded),
    "tensor_parallel": Case(
        "tensor parallel: `parallelize_module`, the sequence in parts between; `ranks_per_unit: 2`",
        parallel_models.Llama,
        tensor_parallel,
        clip=0.5,
        ranks=4,
        ranks_per_unit=2,
    ),
    "tensor_parallel_in_part": Case(
        "tensor parallel attention and feed-forward layers, the rest whole on each rank",
        parallel_models.Llama,
        tensor_parallel_in_part,
        clip=0.5,
        accumulate=2,
        ranks=4,
        ranks_per_unit=2,
    ),
    "expert_parallel": Case(
        "expert parallel: each rank has some of the experts, tokens are sent to them",
        lambda: parallel_models.Llama(experts=True),
        expert_parallel,
        clip=0.5,
        ranks=4,
    ),
    "expert_parallel_weighed": weighed(
        "expert parallel, padded batches, weighed by their tokens",
        lambda: parallel_models.Llama(experts=True),
        expert_parallel,
        batch=padded_or_empty,
        ranks=4,
    ),
    "packed": weighed("packed batches of unequal length, weighed by their tokens", batch=packed),
    "batch_norm": Case(
        'BatchNorm with running statistics, batch_norm="mean"',
        lambda: Convolutional(nn.BatchNorm1d),
        batch_norm="mean",
        accumulate=2,
    ),
    "evaluation": Case(
        "evaluation in job.pause, of a model with dropout", lambda: Decoder(dropout=0.2), beside=evaluate
    ),
    "average": Case("an average of the weights (EMA) by job.register_state", average=True),
    "pretrained": Case("pretrained weights, loaded into a model made on the meta device", weights=pretrained),
    "exported": Case(
        "the weights of launcher.py export, tied ones too", lambda: Decoder(tied=True), exported=True
    ),
    "output_with_loss": Case("a model that returns a mapping with its loss", WithLoss, loss=of_output),
}


def units(step: int, case: Case, replicas: int, ranks: int) -> Iterable[tuple[int, int, int, int]]:
    """The places (data shard, index, rank, micro-batch) of a step of a job in which nothing fails."""
    return [
        (shard, step - 1, rank, micro)
        for shard in range(replicas)
        for rank in range(ranks)
        for micro in range(case.accumulate)
    ]


@dataclass(frozen=True)
class Source:
    case: Case
    shards: int
    ranks: int

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Any:
        unit = ((index * self.shards + shard) * self.ranks + rank) * self.case.accumulate + micro
        return self.case.batch(unit)


def listed(made: Any) -> Sequence[Any]:
    """Several, or the one that it is."""
    return made if isinstance(made, list) else [made]
