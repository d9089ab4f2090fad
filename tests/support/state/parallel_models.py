"""Models that are tensor or expert parallel inside a replica, with the calls by which users make them so.

Each is a function of torch's seed alone, and runs in one process as it is.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

VOCABULARY, DIM, HEAD, EXPERTS = 32, 16, 4, 4


class Attention(nn.Module):
    """Causal attention; with tensor parallelism each rank has a part of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """As Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return result


class Experts(nn.Module):
    """A mixture of experts, all in one parameter each; a token goes to its best one.

    With expert parallelism a rank holds some of them, and tokens are sent to the rank of their expert and back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.weights = ExpertWeights()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        scores = self.router(flat).softmax(-1)
        best = scores.argmax(-1)
        order = best.argsort(stable=True)
        counts = torch.bincount(best, minlength=EXPERTS)
        done = self.weights(flat[order], counts)
        result = torch.zeros_like(flat).index_add(0, order, done)
        return (result * scores.gather(-1, best[:, None])).view_as(x)


class ExpertWeights(nn.Module):
    """The experts, for tokens that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / 4)
        self.ep: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        if self.ep is None:
            return self._apply_to(x, counts.tolist())
        size = self.ep.size()
        theirs = torch.empty_like(counts)  # for each rank, how many tokens it has for each of my experts
        dist.all_to_all_single(theirs, counts, group=self.ep)
        sent, taken = (c.view(size, -1).sum(1).tolist() for c in (counts, theirs))
        here: Any = all_to_all_single_autograd(x, taken, sent, self.ep)
        of_expert = torch.arange(len(theirs) // size).repeat(size).repeat_interleave(theirs)
        order = of_expert.argsort(stable=True)
        done = self._apply_to(here[order], torch.bincount(of_expert, minlength=len(theirs) // size).tolist())
        back = torch.zeros_like(done).index_add(0, order, done)
        result: Tensor = all_to_all_single_autograd(back, sent, taken, self.ep)
        return result

    def _apply_to(self, x: Tensor, counts: list[int]) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        pieces = zip(x.split(counts), up, down, strict=True)
        return torch.cat([functional.silu(piece @ u) @ d for piece, u, d in pieces])


class Block(nn.Module):
    """Attention, then a feed-forward layer or experts."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.ffn_norm, self.ffn = nn.RMSNorm(DIM), Experts() if experts else FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.ffn(self.ffn_norm(x))
        return result


class Llama(nn.Module):
    """A small decoder like Llama, with experts or without."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block(experts) for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def mesh_of(ranks: int, inner: int, names: tuple[str, str]) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks // inner, inner), mesh_dim_names=names)


def sharded(model: Llama, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Llama, mesh: DeviceMesh, sequence: bool = True, loss: bool = False) -> None:
    """As torchtitan does it for Llama; the mesh has the dimensions dp and tp.

    With ``sequence`` norms work on parts of the sequence; without it they are no DTensors before `fully_shard`.
    With ``loss`` the logits stay in parts, for `loss_parallel`.
    """
    tp = mesh["tp"]
    logits = Shard(-1) if loss else Replicate()
    if not sequence:
        for layer in model.layers:
            plan: Any = {f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")}
            plan |= {"attention.wo": RowwiseParallel(), "ffn.w2": RowwiseParallel()}
            plan |= {f"ffn.{n}": ColwiseParallel() for n in ("w1", "w3")}
            parallelize_module(layer, tp, plan)
        parallelize_module(model, tp, {"head": ColwiseParallel(output_layouts=Replicate())})
        sharded(model, mesh["dp"])
        return
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=logits, use_local_output=not loss),
        },
    )
    for layer in model.layers:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        plan |= {"attention": whole, "ffn": whole}
        plan |= {f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")}
        plan |= {f"ffn.{n}": ColwiseParallel() for n in ("w1", "w3")}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "ffn.w2")}
        parallelize_module(layer, tp, plan)
    sharded(model, mesh["dp"])


def expert_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """The experts over both dimensions of the mesh, efsdp and ep; the rest over all its ranks at once."""
    ep = mesh["ep"]
    for layer in model.layers:
        weights: Any = layer.get_submodule("ffn.weights")
        weights.ep = ep.get_group()
        for name, param in list(weights.named_parameters()):
            weights.register_parameter(name, nn.Parameter(distribute_tensor(param, ep, [Shard(0)])))
        fully_shard(weights, mesh=mesh["efsdp"])
    sharded(model, mesh._flatten("fsdp"))
