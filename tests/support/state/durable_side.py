from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.checkpoint.writer import Checkpointer, CheckpointOrigin, Header, Outcome, Published
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.state.transfer.shard_manifest import Layout
from ft_hsdp.train.fsdp import frozen
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel, shard
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import tensors
from ft_hsdp.train.state import packing
from ft_hsdp.train.state.packing import state_digest


class Uneven(nn.Module):
    """Parameters of 7, 1, 5 and 2 rows: with three ranks most have uneven shards and some have empty ones.

    One more is frozen, with values of a seed of its own.
    """

    def __init__(self, seed: int, width: int, frozen: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.wide = nn.Parameter(torch.randn(7, width, generator=g))
        self.one = nn.Parameter(torch.randn(1, generator=g))
        self.deep = nn.Parameter(torch.randn(5, 3, 2, generator=g))
        self.two = nn.Parameter(torch.randn(2, 4, generator=g))
        g.manual_seed(frozen)
        self.still = nn.Parameter(torch.randn(5, 2, generator=g), requires_grad=False)


def two_layers() -> nn.Module:
    """Two layers for tensor parallelism, of sizes that four ranks do not share evenly, and a norm."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7), nn.LayerNorm(7))


class Side:
    """A rank's live state: an FSDP2 model and AdamW, filled from a seed."""

    def __init__(self, ranks: int, seed: int, width: int = 8, still: int = 0) -> None:
        model = Uneven(seed, width, still)
        shard(model, [], init_device_mesh("cpu", (ranks,)))
        sharded = AdoptedModel(model, ranks, lambda _, __: None)
        optimizer = torch.optim.AdamW(sharded.params.values(), lr=0.1)
        create_state(optimizer)
        self.params = sharded.params
        self.optim = tensors(optimizer, {id(p): n for n, p in sharded.params.items()})
        for at, tensor in enumerate(self.optim.values()):  # alike on any number of ranks
            whole = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed * 1000 + at))
            mine = packing.local(tensor)
            first = _first_row(tensor) if isinstance(tensor, DTensor) else 0
            mine.copy_(whole[first : first + mine.shape[0]] if isinstance(tensor, DTensor) else whole)
        # State of the user: averages of the weights, and a plain tensor that is alike on all ranks.
        self.user = {f"ema/{n}": p.detach() * 2 for n, p in self.params.items()}
        self.user["ema/decay"] = torch.tensor([seed * 1.5, 0.5])
        self.layout = Layout.of(self.params, self.optim, self.user)
        self.ranks = ReplicaGroup(timeout_s=60.0)
        self.made: list[Checkpointer] = []
        self.frozen = frozen.described(frozen.tensors(model), self.ranks)

    def packed(self) -> torch.Tensor:
        buffer = torch.empty(self.layout.nbytes, dtype=torch.uint8)
        live = [*self.params.values(), *self.optim.values(), *self.user.values()]
        packing.pack(self.layout, live, buffer)
        return buffer

    def digest(self) -> str:
        return state_digest(self.params, self.optim, HYPER, self.user)

    def checkpointer(self, folder: str, keep: int = 2) -> Checkpointer:
        about = CheckpointOrigin("0-a-0", 3, "hash", {"model": {"dim": 8}}, frozen=self.frozen)
        live = self.params, self.optim
        made = Checkpointer(Path(folder), keep, KEY, about, self.layout, *live, self.ranks, self.user)
        self.made.append(made)
        return made


KEY = b"operator's key"
VALUES: dict[str, dict[str, Any]] = {"ema": {"steps": 3, "best": [0.5, None]}}
HYPER = ({"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-08, "foreach": None},)


def _first_row(tensor: DTensor) -> int:
    """Where this rank's rows begin: torch.chunk's rule."""
    size = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(size * tensor.device_mesh.get_local_rank(), tensor.shape[0])


def header(step: int, epoch: int = 1) -> Header:
    return Header(StateId(epoch, step, f"{step:032x}"), Ledger((step, 2 * step, 5)), HYPER, VALUES)


def told(outcome: Outcome) -> dict[str, Any]:
    kind = type(outcome).__name__
    reason = getattr(outcome, "reason", "")
    removed = list(outcome.removed) if isinstance(outcome, Published) else []
    return {"kind": kind, "step": outcome.state.step, "reason": reason, "removed": removed}
