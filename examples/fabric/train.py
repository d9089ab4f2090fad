"""A small language model under Lightning Fabric, on replicas of two ranks that may be lost and come back.

    python launcher.py up examples/fabric/config.yaml

plain.py beside it is the same script for one replica, without ft_hsdp. The lines that differ end with a mark.
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from ft_hsdp.integrations.fabric import FtHsdpStrategy  # FT

EPOCHS = 3
VOCABULARY = 31


class Counts(Dataset[Tensor]):
    """Sequences of numbers; each number follows from the one before by the rule of its sequence."""

    def __init__(self, size: int = 960, length: int = 24) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        first, step = index % VOCABULARY, 1 + index % 5
        return (first + step * torch.arange(self.length)) % VOCABULARY


class Block(nn.Module):
    """Causal attention, and a network for each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix = nn.Linear(width, 3 * width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [rows, length, width] in and out."""
        query, key, value = self.mix(self.norms[0](x)).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.feed(self.norms[1](x))


class Model(nn.Module):
    """Predicts the next number at each position."""

    def __init__(self, width: int = 48, depth: int = 2, length: int = 24) -> None:
        super().__init__()
        self.numbers = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers [rows, length] in, logits [rows x length, vocabulary] out."""
        hidden = self.numbers(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden).flatten(0, 1))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each block by itself, the norm and the head together, and what is left."""
    ranks = mesh["data_parallel"]
    for part in (*model.blocks, [model.norm, model.head], model):
        fully_shard(part, mesh=ranks)
    return model


def main() -> None:
    """Train for some epochs."""
    strategy = FtHsdpStrategy(shard, max_norm=1.0)  # FT
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    model = fabric.setup_module(Model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    strategy.setup_scheduler(scheduler)  # FT
    loader = strategy.setup_dataloader(DataLoader(Counts(), batch_size=8, shuffle=True))  # FT
    for epoch in loader.epochs(EPOCHS):  # FT
        for numbers in loader:
            logits = model(numbers[:, :-1])
            loss = functional.cross_entropy(logits, numbers[:, 1:].flatten())
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
