"""A small Llama-style transformer: RMSNorm, rotary positions, SwiGLU, grouped queries.

Its parts are cut for FSDP2: the embedding, each block and the output can be sharded apart, so that
the ring of no bucket has to wait for the root's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ft_hsdp.core.randomness import stream
from ft_hsdp.train.data.batches import IGNORED

if TYPE_CHECKING:
    from ft_hsdp.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelArgs:
    vocabulary: int  # tokens
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    seq_len: int  # of the longest sequence
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    recompute: bool = False  # blocks keep their input only, and run forward again in backward

    @classmethod
    def of(cls, config: ModelConfig, vocabulary: int, seq_len: int, recompute: bool = False) -> ModelArgs:
        return cls(
            vocabulary=vocabulary,
            dim=config.dim,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.key_value_heads,
            ffn_dim=config.hidden_dim,
            seq_len=seq_len,
            rope_theta=config.rope_theta,
            norm_eps=config.norm_eps,
            recompute=recompute,
        )


class Transformer(nn.Module):
    """The model; its weights are a function of `args` and `seed` alone."""

    cos: Tensor
    sin: Tensor

    def __init__(self, args: ModelArgs, seed: int = 0) -> None:
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(args.vocabulary, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.output = Output(args)
        cos, sin = self._rotations()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if not cos.is_meta:
            self.reset(seed)

    def shards(self) -> list[nn.Module]:
        return [self.embed, *self.layers, self.output]

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits of the next token.

        Raises:
            ValueError: The sequences are too long.
        """
        length = inputs.shape[1]
        if length > self.args.seq_len:
            raise ValueError(f"a sequence of {length} tokens; the model takes at most {self.args.seq_len}")
        hidden = self.embed(inputs)
        for block in self.layers:
            hidden = block(hidden, self.cos[:length], self.sin[:length])
        out: Tensor = self.output(hidden)
        return out

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats, a scalar, of (inputs, targets), int64 [batch, seq] each.

        It is the mean over the targets that are not `IGNORED`; NaN if there is none.
        """
        inputs, targets = batch
        logits = self.logits(inputs).flatten(0, 1).float()
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw every parameter anew, each from a generator of its own, keyed by (seed, name), and set the buffers.

        Of a parameter that is sharded this rank takes its rows: the values do not depend on the sharding.
        """
        for buffer, values in zip((self.cos, self.sin), self._rotations(), strict=True):
            buffer.copy_(values)
        for name, parameter in self.named_parameters():
            std = _spread(name, self.args)
            if std is None:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(stream(seed, "init", name))
            drawn, shard = torch.randn(parameter.shape, generator=generator).mul_(std), parameter.data
            if isinstance(shard, DTensor):
                ranks, rank = shard.device_mesh.size(), shard.device_mesh.get_local_rank()
                rows = -(-len(drawn) // ranks)
                drawn, shard = drawn[rank * rows : (rank + 1) * rows], shard.to_local()
            shard.copy_(drawn)

    def _rotations(self) -> tuple[Tensor, Tensor]:
        args = self.args
        return rotations(args.seq_len, args.dim // args.heads, args.rope_theta)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm, each added to the stream."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn = FeedForward(args)
        self.recompute = args.recompute

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, seq, dim]; cos, sin [seq, head_dim / 2] -> [batch, seq, dim]."""
        if not self.recompute:
            return self._forward(x, cos, sin)
        out: Tensor = checkpoint(self._forward, x, cos, sin, use_reentrant=False)
        return out

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Attention(nn.Module):
    """Causal self-attention; `heads / kv_heads` queries share a key and a value."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.heads
        self.grouped = args.kv_heads != args.heads
        self.query = nn.Linear(args.dim, args.dim, bias=False)
        self.key = nn.Linear(args.dim, args.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(args.dim, args.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(args.dim, args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, seq, dim]; cos, sin [seq, head_dim / 2] -> [batch, seq, dim]."""
        q = rotate(self._split(self.query(x)), cos, sin)
        k = rotate(self._split(self.key(x)), cos, sin)
        v = self._split(self.value(x))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[batch, seq, heads * head_dim] -> [batch, heads, seq, head_dim]."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.gate = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.up = nn.Linear(args.dim, args.ffn_dim, bias=False)
        self.down = nn.Linear(args.ffn_dim, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> the same shape."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Output(nn.Module):
    """The last norm and the head, which shares no weights with the embedding."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.head = nn.Linear(args.dim, args.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, vocabulary]."""
        out: Tensor = self.head(self.norm(x))
        return out


def rotations(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [length, head_dim / 2] each."""
    rates = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [batch, heads, seq, head_dim] by their angles, in fp32."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def _spread(name: str, args: ModelArgs) -> float | None:
    """Standard deviation of a parameter at the start; None for a norm's scale, which is 1."""
    if "norm" in name:
        return None
    if name.endswith(("attention.out.weight", "ffn.down.weight")):
        fan_in = args.dim if "attention" in name else args.ffn_dim
        return 1.0 / math.sqrt(fan_in * 2 * args.layers)
    if name == "output.head.weight":
        return 0.02
    return 0.02 if name == "embed.weight" else 1.0 / math.sqrt(args.dim)
