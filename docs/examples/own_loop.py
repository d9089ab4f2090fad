"""A training loop of your own, made fault-tolerant: a classifier of spirals under FSDP2.

    python launcher.py up CONFIG --entry=docs/examples/own_loop.py

docs/library.md shows the plain FSDP2 loop that this was, what each changed line (marked FT) does, and how torchrun
starts it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import ft_hsdp  # FT

Pair = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """Points [n, 2] and their spiral [n] in, the mean loss (a scalar) out."""

    def __init__(self, width: int = 64, depth: int = 3, spirals: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.outer = nn.Linear(width, spirals)

    def forward(self, batch: Pair) -> Tensor:
        """The mean loss of a batch."""
        points, spiral = batch
        hidden = self.inner(points)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return functional.cross_entropy(self.outer(hidden), spiral)


class Spirals:
    """Endless noisy points; each batch is a pure function of its place."""

    def __init__(self, rows: int = 64, seed: int = 0) -> None:
        self.rows = rows
        self.seed = seed

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Pair:
        """Batch ``index`` of data shard ``shard``: the part of ``rank``, micro-batch ``micro``."""
        place = hash((self.seed, shard, index, rank, micro)) % 2**63  # of integers: the same in every process
        random = torch.Generator().manual_seed(place)
        spiral = torch.randint(3, (self.rows,), generator=random)
        radius = torch.rand(self.rows, generator=random)
        angle = 4 * radius + spiral * (2 * torch.pi / 3) + 0.1 * torch.randn(self.rows, generator=random)
        return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), spiral


def main() -> None:
    """Train until the job ends."""
    job = ft_hsdp.join()  # FT
    data = Spirals()
    torch.manual_seed(job.config.train.seed)  # FT
    model = job.shard(Classifier())  # FT
    adam = torch.optim.AdamW(model.parameters(), lr=job.config.optim.lr)  # FT
    optim = job.optimizer(adam, lambda step: min(1.0, step / 10))  # FT
    optim.clip = job.config.optim.clip  # FT
    job.warm_up(lambda: model(data.batch(0, 0, job.rank)).backward())  # FT
    for batch in job.batches(data, job.config.train.accumulate):  # FT
        loss = model(batch)
        loss.backward()
        optim.step()  # FT


if __name__ == "__main__":
    main()
