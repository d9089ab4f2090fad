"""Small models of the kinds that users train; each is a function of torch's seed alone."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, DIM, LENGTH = 32, 16, 8


class Block(nn.Module):
    """Attention and a feed-forward layer, or experts in place of that."""

    def __init__(self, dropout: float = 0.0, experts: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(dropout)
        self.ffn: nn.Module = Experts(experts) if experts else nn.Sequential(*feed_forward())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.ffn(x)


def feed_forward() -> tuple[nn.Module, ...]:
    return nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)


class Experts(nn.Module):
    """A mixture of experts; each token goes to its best one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, count)
        self.experts = nn.ModuleList(nn.Sequential(*feed_forward()) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.argmax(-1, keepdim=True)
        chosen = torch.zeros_like(scores).scatter(-1, best, scores.gather(-1, best))
        outputs = [chosen[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts)]
        return torch.stack(outputs).sum(0)


class Decoder(nn.Module):
    """A language model: embedding, blocks, norm and head."""

    def __init__(
        self, *, tied: bool = False, dropout: float = 0.0, experts: int = 0, named_layers: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        blocks = [Block(dropout, experts) for _ in range(2)]
        named = {str(i): block for i, block in enumerate(blocks)}
        self.layers: Any = nn.ModuleDict(named) if named_layers else nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def blocks(self) -> list[nn.Module]:
        return list(self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks():
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class LowRank(nn.Module):
    """A frozen linear layer with two small trainable matrices beside it, as LoRA has them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.b(self.a(x))
        return result


class Convolutional(nn.Module):
    """Convolutions over the embedded tokens, with a norm of choice."""

    def __init__(self, norm: type[nn.Module] = nn.GroupNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        made = nn.GroupNorm(4, DIM) if norm is nn.GroupNorm else norm(DIM)  # type: ignore[call-arg]
        self.body = nn.Sequential(nn.Conv1d(DIM, DIM, 3, padding=1), made, nn.ReLU())
        self.head = nn.Linear(DIM, VOCABULARY)

    def blocks(self) -> list[nn.Module]:
        return [self.body]

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(tokens).transpose(1, 2)).transpose(1, 2))
        return logits


class WithLoss(nn.Module):
    """A model that returns a mapping with its loss, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    def blocks(self) -> list[nn.Module]:
        return self.model.blocks()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = self.model(tokens)
        return {"loss": next_token_loss(logits, tokens), "logits": logits}


def next_token_loss(logits: Tensor, tokens: Tensor, ignored: int = -100) -> Tensor:
    """The mean over the targets, which are the tokens one place later; ``ignored`` ones do not count."""
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), ignore_index=ignored
    )
