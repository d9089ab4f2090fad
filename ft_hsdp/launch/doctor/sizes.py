"""Sizes: of the model, and of what the job holds; for people in GiB."""

from __future__ import annotations

from ft_hsdp.config import Config


def parameters(config: Config) -> int:
    """Number of parameters of the model, embedding and head included."""
    from ft_hsdp.train.tokens import VOCABULARY  # numpy is not needed for --help

    model = config.model
    kv = model.dim // model.heads * model.key_value_heads
    block = 2 * model.dim**2 + 2 * model.dim * kv + 3 * model.dim * model.hidden_dim + 2 * model.dim
    return model.layers * block + 2 * VOCABULARY[config.data.tokenizer] * model.dim + model.dim


def weights(config: Config) -> int:
    """Bytes of one fp32 copy of the model."""
    return 4 * parameters(config)


def gib(size: float) -> str:
    """Bytes in GiB, for people."""
    return f"{size / 2**30:.1f} GiB"
