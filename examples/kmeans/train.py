"""k-means of points that lie in a block store (ReStore §VI-C): docs/blocks.md runs it.

Each rank has an equal part of the points. An iteration assigns them to the nearest centers and adds them up; the
job sums over all ranks as it sums gradients, and the optimizer moves each center to the mean of its points. The
points are small integers, so the sums are exact in float32, and no loss of a host changes a bit of the result.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import ft_hsdp

DIMENSIONS, CLUSTERS = 32, 20


class Centers(nn.Module):
    """Points [n, d] in, the mean squared distance to their centers (a scalar) out.

    The gradient of ``table`` [k, d + 1] is no gradient: it has the sum of the points of each center, and their
    number.
    """

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.cat((first, torch.ones(len(first), 1)), dim=1))

    def forward(self, points: Tensor) -> Tensor:
        """Assign the points, and add them up."""
        squares = torch.cdist(points, self.table[:, :-1].detach()).square()
        distance, nearest = squares.min(dim=1)
        ones = torch.ones(len(points), 1)
        sums = torch.zeros_like(self.table).index_add_(0, nearest, torch.cat((points, ones), dim=1))
        product = (self.table * sums).sum()
        return distance.mean() + product - product.detach()


class Lloyd(torch.optim.Optimizer):
    """Moves each center to the mean of its points; one without points stays."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 1.0})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Move all centers."""
        for table in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            sums, count = table.grad[:, :-1], table.grad[:, -1:]
            table[:, :-1] = torch.where(count > 0, sums / count.clamp(min=1e-30), table[:, :-1])


class Part:
    """The points of this rank: each step trains on all of them."""

    def __init__(self, points: Tensor) -> None:
        self.points = points

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Tensor:
        """The same points each time."""
        return self.points


def main() -> None:
    """Cluster until the job ends."""
    job = ft_hsdp.join()
    file = Path(sys.argv[1])
    store = ft_hsdp.BlockStore(job, "points", file.stat().st_size // DIMENSIONS, DIMENSIONS)
    store.submit(file)  # from the memory of the hosts; from the file only what no host has
    points = torch.from_numpy(store.load([store.share()])).float()
    first = torch.from_numpy(store.load([(0, CLUSTERS)])).float()  # the centers begin at the first points
    model = job.shard(Centers(first))
    optim = job.optimizer(Lloyd(model.parameters()))
    for batch in job.batches(Part(points)):
        loss = model(batch)
        loss.backward()
        optim.step(loss=loss)


if __name__ == "__main__":
    main()
