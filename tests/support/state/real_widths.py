"""A script: the shards that FSDP2 and AdamW really make, on each rank of several widths, without communication."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ft_hsdp.state.transfer import parts
from ft_hsdp.state.transfer.shard_manifest import Layout
from ft_hsdp.train.optimizer.groups import tensors


class Model(nn.Module):
    """Shapes that no width divides, with a tied weight and a bias of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 7)
        self.layers = nn.ModuleList([nn.Linear(7, 10), nn.Linear(10, 7)])
        self.head = nn.Linear(7, 101, bias=False)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(101, 1)


def layout(width: int, rank: int, columns: bool = False) -> Layout:
    """The layout of a rank; with ``columns`` one layer is cut in its second dimension."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=width)
    try:
        model, mesh = Model(), init_device_mesh("cpu", (width,))
        fully_shard(model.layers[0], mesh=mesh)
        by_columns = (lambda p: Shard(p.ndim - 1)) if columns else None
        fully_shard(model.layers[1], mesh=mesh, shard_placement_fn=by_columns)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        names = {id(param): name for name, param in model.named_parameters()}
        return Layout.of(dict(model.named_parameters()), tensors(optimizer, names))
    finally:
        dist.destroy_process_group()


found = {(width, rank): layout(width, rank) for width in (1, 3, 4) for rank in range(width)}
for (width, rank), place in found.items():
    parts.check(place.tensors, width, rank)
    for (other, its), wanted in found.items():
        assert parts.layout_at(place.tensors, other, its) == wanted, (width, rank, other, its)
assert {(t.name.endswith(".step"), t.cut) for t in found[4, 3].tensors} == {(True, "whole"), (False, "rows")}
with pytest.raises(parts.Uncuttable, match="is not cut by rows"):
    parts.check(layout(2, 1, columns=True).tensors, 2, 1)
