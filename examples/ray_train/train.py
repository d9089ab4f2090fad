"""A small language model under Ray Train, on replicas of two workers that may be lost and come back.

    python examples/ray_train/train.py

plain.py beside it is the same script without ft_hsdp. The lines that differ end with a mark.
"""

from __future__ import annotations

import sys
from typing import Any

import ray.train
import torch
from ray.train import ScalingConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import ft_hsdp  # FT
from ft_hsdp.integrations.ray_train import FtHsdpTorchTrainer, prepare_data_loader  # FT

EPOCHS = 5
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
    """Predicts the next number at each position; returns the loss."""

    def __init__(self, width: int = 48, depth: int = 2, length: int = 24) -> None:
        super().__init__()
        self.numbers = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers [rows, length + 1] in, mean loss out."""
        hidden = self.numbers(x[:, :-1]) + self.places.weight[: x.shape[1] - 1]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden).flatten(0, 1))
        return functional.cross_entropy(logits, x[:, 1:].flatten())


def shard(model: Model) -> Model:
    """Shard each block, and the rest, over the workers."""
    mesh = init_device_mesh("cpu", (ray.train.get_context().get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Train for some epochs, in each worker."""
    job = ft_hsdp.join()  # FT
    torch.manual_seed(0)
    model = job.adopt(shard(Model()))  # FT
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    optimizer = job.optimizer(optimizer, scheduler)  # FT
    optimizer.clip = 1.0  # FT
    loader = DataLoader(Counts(), batch_size=8, shuffle=True)
    loader = prepare_data_loader(job, loader)  # FT
    for epoch in loader.epochs(EPOCHS):  # FT
        for numbers in loader:
            loss = model(numbers)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        ray.train.report({"epoch": epoch, "loss": loss.item()})
        if ray.train.get_context().get_world_rank() == 0:
            sys.stdout.write(f"epoch {epoch}: loss {loss.item():.4f}\n")


def main() -> None:
    """Train on a Ray cluster."""
    trainer = FtHsdpTorchTrainer(  # FT
        train_loop_per_worker,
        job_config="examples/ray_train/config.yaml",  # FT
        train_loop_config={"lr": 1e-2},
        scaling_config=ScalingConfig(num_workers=4),
    )
    result = trainer.fit()
    sys.stdout.write(f"{result.path}\n")


if __name__ == "__main__":
    main()
