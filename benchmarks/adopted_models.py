"""The models of `bench adopt`: the Llama of transformers, with random weights, and the built-in one of its shape.

Each is made of a setup and its configuration, as `ft_hsdp.bench.training` makes models. Its layers can wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ft_hsdp.bench.jobs import Setup
from ft_hsdp.bench.training import Delay
from ft_hsdp.config import Config
from ft_hsdp.train.fsdp.adopted_model import parts_of
from ft_hsdp.train.trainer import build


def llama(setup: Setup, config: Config) -> nn.Module:
    """Return the Llama of transformers. It takes tokens as labels, and shifts them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Llama(LlamaForCausalLM):
        def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
            return super().forward(input_ids=batch[0], labels=batch[0]).loss

    shape = config.model
    torch.manual_seed(config.train.seed)
    made = LlamaConfig(
        vocab_size=config.data.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=config.train.seq_len,
        use_cache=False,
    )
    return _waiting(Llama(made), setup.wait_s)


def built_in(setup: Setup, config: Config) -> nn.Module:
    """Return the built-in model."""
    return _waiting(build(config), setup.wait_s)


def _waiting(model: nn.Module, wait_s: float) -> nn.Module:
    """Have forward and backward of the layers, which return a tensor, wait ``wait_s`` seconds together."""
    layers = parts_of(model)
    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: Delay.apply(output, wait_s / len(layers)))
    return model
