"""How users shard models: cases of `tests.compatibility`, and what their jobs leave out; each with its buckets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.compatibility.cases import CASES, each_block, experts_inside_blocks, of_logits, tail_as_a_list, tokens
from tests.compatibility.models import Decoder


def once(model: nn.Module, seed: int) -> Tensor:
    return of_logits(model, tokens(seed))


def twice(model: nn.Module, seed: int) -> Tensor:
    """Two forwards before one backward, as for pairs of a chosen and a rejected answer."""
    return once(model, seed) - 0.3 * once(model, seed + 10)


class Chunked(Decoder):
    """Its forward leaves the head out; the loss runs it on one piece of the sequence after the other."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks():
            x = block(x)
        return self.norm(x)


def in_chunks(model: Any, seed: int) -> Tensor:
    batch = tokens(seed)
    pieces = zip(model(batch)[:, :-1].split(3, dim=1), batch[:, 1:].split(3, dim=1), strict=True)
    losses = [
        functional.cross_entropy(model.head(h).flatten(0, 1), t.flatten(), reduction="sum") for h, t in pieces
    ]
    return torch.stack(losses).sum() / batch[:, 1:].numel()


def shard_by_columns(model: Any, mesh: DeviceMesh) -> None:
    """`Shard(1)` for the matrices of the layers."""
    for block in model.blocks():
        fully_shard(block, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    fully_shard(model, mesh=mesh)


def shard_in_two_groups(model: Any, mesh: DeviceMesh) -> None:
    """A parameter on a mesh of its own, in the same module: two groups, as torch 2.12 and newer have them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    same_ranks = dist.new_group(list(range(mesh.size())))
    other = FSDPMeshInfo(DeviceMesh.from_group(same_ranks, "cpu"), shard_mesh_dim=0)
    for block in model.blocks():

        def place(param: nn.Parameter, router: nn.Parameter = block.ffn.router.weight) -> Any:
            return ShardPlacementResult(Shard(0), other) if param is router else None

        fully_shard(block, mesh=mesh, shard_placement_fn=place)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_on_meta(model: Any, mesh: DeviceMesh) -> None:
    """Materialise after sharding, and load the weights then."""
    weights: dict[str, Any] = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.to("meta")
    tail_as_a_list(model, mesh)
    model.to_empty(device="cpu")
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def shard_unused(model: Any, mesh: DeviceMesh) -> None:
    """A group that no batch uses."""
    fully_shard(model.never, mesh=mesh)
    tail_as_a_list(model, mesh)


def not_divided(model: Any, mesh: DeviceMesh) -> None:
    """As torchtitan does, which divides by itself."""
    tail_as_a_list(model, mesh)
    for module in (model, model.norm, *model.blocks()):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def recomputed_experts() -> Decoder:
    model = Decoder(experts=3)
    model.layers = nn.ModuleList(checkpoint_wrapper(block) for block in model.layers)
    return model


def checkpoint_in_forward() -> Decoder:
    """Recompute the layers in backward by replacing their forward, as Hugging Face does."""
    model = Decoder()
    for block in model.blocks():
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)  # type: ignore
    return model


@dataclass(frozen=True)
class Kind:
    make: Callable[[], Any]
    shard: Callable[[Any, DeviceMesh], None]
    buckets: int
    loss: Callable[[Any, int], Tensor] = once
    reduced: torch.dtype | None = None  # type in which the gradients are added up inside the replica
    tolerance: float = 0.0  # FSDP2 adds in another order where it reduces a group several times in a backward
    unused: bool = False  # whether forward leaves parameters unused; their numbers of uses are one bucket more


SAME = {"root": 1, "tied": 3, "tied_list": 3, "list": 4, "module_dict": 3, "moe": 9, "lora": 2}
SAME |= {"frozen_module": 3, "frozen_parameters": 3, "kept_gathered": 3, "recompute": 3, "compile": 3}

KINDS: dict[str, Kind] = {name: Kind(CASES[name].model, CASES[name].shard, n) for name, n in SAME.items()} | {
    "two groups": Kind(lambda: Decoder(experts=3), shard_in_two_groups, 6),
    "columns": Kind(Decoder, shard_by_columns, 3),
    "meta": Kind(Decoder, shard_on_meta, 4),
    "bf16": Kind(lambda: Decoder().bfloat16(), each_block, 3),
    "bf16, sums fp32": Kind(
        CASES["bf16_parameters"].model, CASES["bf16_parameters"].shard, 3, reduced=torch.float32
    ),
    "unused": Kind(CASES["unused"].model, shard_unused, 6, unused=True),
    "twice": Kind(Decoder, tail_as_a_list, 4, twice, tolerance=1e-7),
    "chunks": Kind(Chunked, tail_as_a_list, 4, in_chunks, tolerance=1e-7),
    "not divided": Kind(Decoder, not_divided, 4),
    "checkpoint": Kind(checkpoint_in_forward, each_block, 3),
    "checkpoint, nested": Kind(recomputed_experts, experts_inside_blocks, 9),
}
if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.11
    del KINDS["two groups"], KINDS["unused"], KINDS["chunks"]
