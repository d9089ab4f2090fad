"""A small language model under Accelerate, on two ranks.

    python -m torch.distributed.run --standalone --nproc-per-node=2 examples/accelerate/plain.py

train.py beside it is the same script on replicas that may be lost; the lines that differ are marked there.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

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
    """Predicts the next number at each position."""

    _no_split_modules = ("Block",)  # what Accelerate shards by itself, as in models of transformers

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


def main() -> None:
    """Train for some epochs."""
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    set_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    loader = DataLoader(Counts(), batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(EPOCHS):
        for numbers in loader:
            logits = model(numbers[:, :-1])
            loss = functional.cross_entropy(logits, numbers[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
