"""Models of the kinds that users shard by themselves, each with the calls of `fully_shard` that they make."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 17, 8
FP32 = MixedPrecisionPolicy()


class Layer(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Two experts in one parameter each; a token goes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(-1) > 0).long()
        return torch.einsum("bsd,bsdh->bsh", x, self.up[chosen]).clone()  # FSDP2 warns of a view


class Routed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts(x)


class Lora(nn.Module):
    """A frozen matrix and two small trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) / 3)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + (x @ self.a.t()) @ self.b.t()


class Net(nn.Module):
    """Tokens in, a loss out. Its layers are in a ModuleDict, as torchtitan's are."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(i): layer() for i in range(2)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """[batch, seq] to [batch, seq, width], normed."""
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.hidden(tokens[:, :-1]))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Chunked(Net):
    """Its forward leaves the head out; the loss runs it on one piece of the sequence after the other."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.hidden(tokens[:, :-1])


class Skips(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = Layer()


def tokens(seed: int) -> Tensor:
    """[3, 7]."""
    return torch.randint(0, WORDS, (3, 7), generator=torch.Generator().manual_seed(seed))


def once(model: nn.Module, seed: int) -> Tensor:
    loss: Tensor = model(tokens(seed))
    return loss


def twice(model: nn.Module, seed: int) -> Tensor:
    """Two forwards before one backward, as for pairs of a chosen and a rejected answer."""
    loss: Tensor = model(tokens(seed)) - 0.3 * model(tokens(seed + 10))
    return loss


def in_chunks(model: nn.Module, seed: int) -> Tensor:
    assert isinstance(model, Chunked)
    batch = tokens(seed)
    pieces = zip(model(batch).split(3, dim=1), batch[:, 1:].split(3, dim=1), strict=True)
    losses = [
        functional.cross_entropy(model.head(h).flatten(0, 1), t.flatten(), reduction="sum") for h, t in pieces
    ]
    total: Tensor = torch.stack(losses).sum() / batch[:, 1:].numel()
    return total


def usual(model: Net, mesh: DeviceMesh, policy: MixedPrecisionPolicy = FP32) -> None:
    """As torchtitan does: the embedding, each layer, the last two as a list, the root."""
    fully_shard(model.embed, mesh=mesh, mp_policy=policy)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@dataclass(frozen=True)
class Kind:
    make: Callable[[], Net] = Net
    shard: Callable[[Net, DeviceMesh], None] = usual
    loss: Callable[[nn.Module, int], Tensor] = once
    buckets: int = 4
    dtype: torch.dtype = torch.float32
    reduced: torch.dtype | None = None  # type in which the gradients are added up inside the replica
    plain: Callable[[Net], None] = lambda model: None  # what is done to the model before it is sharded
    tolerance: float = 0.0  # FSDP2 adds in another order where it reduces a group several times in a backward
    unused: bool = False  # whether forward leaves parameters unused; their numbers of uses are one bucket more


def tie(model: Net) -> None:
    """Share the weights of embedding and head."""
    model.head.weight = model.embed.weight


def shard_tied(model: Net, mesh: DeviceMesh) -> None:
    """Tied weights have to be in one group."""
    fully_shard([model.embed, model.norm, model.head], mesh=mesh)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def freeze_embedding(model: Net) -> None:
    """A frozen group."""
    model.embed.requires_grad_(False)


def freeze_some(model: Net) -> None:
    """Frozen parameters inside groups."""
    for layer in model.layers.values():
        layer.get_submodule("up").requires_grad_(False)


def freeze_all_but_layers(model: Net) -> None:
    """Only adapters are left."""
    for module in (model.embed, model.norm, model.head):
        module.requires_grad_(False)


def shard_nested(model: Net, mesh: DeviceMesh) -> None:
    """Experts have a group inside that of their layer."""
    for layer in model.layers.values():
        fully_shard(layer.get_submodule("experts"), mesh=mesh)
    usual(model, mesh)


def shard_by_columns(model: Net, mesh: DeviceMesh) -> None:
    """`Shard(1)` for the matrices of the layers."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)
    fully_shard(model, mesh=mesh)


def shard_in_two_groups(model: Net, mesh: DeviceMesh) -> None:
    """Experts on a mesh of their own, in the same module: two groups, as torch 2.12 and newer have them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    same_ranks = dist.new_group(list(range(mesh.size())))
    assert same_ranks is not None
    other = FSDPMeshInfo(DeviceMesh.from_group(same_ranks, "cpu"), shard_mesh_dim=0)
    for layer in model.layers.values():
        up = layer.get_submodule("experts").get_parameter("up")

        def place(param: nn.Parameter, up: nn.Parameter = up) -> ShardPlacementResult | None:
            return ShardPlacementResult(Shard(0), other) if param is up else None

        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_on_meta(model: Net, mesh: DeviceMesh) -> None:
    """Materialise after sharding, and load the weights then."""
    weights: dict[str, Any] = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.to("meta")
    usual(model, mesh)
    model.to_empty(device="cpu")
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def shard_unused(model: Net, mesh: DeviceMesh) -> None:
    """A group that no batch uses."""
    fully_shard(model.get_submodule("unused"), mesh=mesh)
    usual(model, mesh)


def keep(model: Net, mesh: DeviceMesh) -> None:
    """Do not free the whole parameters after forward."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)


def not_divided(model: Net, mesh: DeviceMesh) -> None:
    """As torchtitan does, which divides by itself."""
    usual(model, mesh)
    for module in (model, model.embed, model.norm, *model.layers.values()):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def wrap_checkpoints(model: Net) -> None:
    """Recompute the layers in backward, as torchtitan and accelerate do."""
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer)


def checkpoint_in_forward(model: Net) -> None:
    """Recompute the layers in backward by replacing their forward, as Hugging Face does."""
    for layer in model.layers.values():
        forward = layer.forward
        layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)  # type: ignore


def compile_layers(model: Net) -> None:
    for layer in model.layers.values():
        layer.compile(backend="aot_eager")


def to_bf16(model: Net) -> None:
    model.bfloat16()


BF16_SUMS_FP32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)

KINDS: dict[str, Kind] = {
    "usual": Kind(),
    "tied": Kind(plain=tie, shard=shard_tied, buckets=3),
    "frozen module": Kind(plain=freeze_embedding, buckets=3),
    "frozen inside": Kind(plain=freeze_some),
    "lora": Kind(make=lambda: Net(Lora), plain=freeze_all_but_layers, buckets=2),
    "nested": Kind(make=lambda: Net(Routed), shard=shard_nested, buckets=6),
    "two groups": Kind(make=lambda: Net(Routed), shard=shard_in_two_groups, buckets=6),
    "columns": Kind(shard=shard_by_columns, buckets=3),
    "meta": Kind(shard=shard_on_meta),
    "bf16": Kind(plain=to_bf16, dtype=torch.bfloat16),
    "bf16, sums fp32": Kind(
        plain=to_bf16,
        dtype=torch.bfloat16,
        reduced=torch.float32,
        shard=lambda model, mesh: usual(model, mesh, BF16_SUMS_FP32),
    ),
    "unused": Kind(make=Skips, shard=shard_unused, buckets=6, unused=True),
    "twice": Kind(loss=twice, tolerance=1e-7),
    "chunks": Kind(make=Chunked, loss=in_chunks, tolerance=1e-7),
    "kept": Kind(shard=keep, buckets=3),
    "not divided": Kind(shard=not_divided),
    "checkpoint wrapper": Kind(plain=wrap_checkpoints),
    "checkpoint": Kind(plain=checkpoint_in_forward),
    "checkpoint, nested": Kind(make=lambda: Net(Routed), plain=wrap_checkpoints, shard=shard_nested, buckets=6),
    "compiled": Kind(plain=compile_layers),
}
if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.11
    del KINDS["two groups"], KINDS["unused"], KINDS["chunks"]
