"""The models that the benches train, their data, and the training loop of the jobs whose ranks are killed."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import ft_hsdp
from ft_hsdp.bench.recovery.setup import FILE, RecoverySetup
from ft_hsdp.config import Config
from ft_hsdp.errors import EXIT_LEFT, FtHsdpError
from ft_hsdp.train.identity import IncarnationSource
from ft_hsdp.train.trainer import build_optimizer

FORWARD = 1 / 3  # of the time that a layer waits; backward takes the rest
WORDS = 257  # bytes, and the end of a text
SEQ_LEN, MICRO_BATCH = 128, 4
DIM, FFN_DIM, LAYERS, HEADS = 160, 448, 6, 5  # as in configs/quickstart.yaml


class Waiting(nn.Module):
    """A model whose forward and backward wait instead of computing, as a CPU does beside a busy accelerator.

    It has ``layers`` layers of ``elements`` fp32 parameters each; forward and backward together wait ``wait_s``
    seconds. Gradients are whole tensors, ready layer by layer, so that they are exchanged during the rest of
    backward.
    """

    def __init__(self, layers: int, elements: int, wait_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(elements, wait_s / layers) for _ in range(layers))

    def shards(self) -> list[nn.Module]:
        """Return the modules to shard, each for itself."""
        return list(self.layers)

    def forward(self, batch: object) -> Tensor:
        """Return a scalar, whatever ``batch`` is."""
        hidden = torch.ones(1, requires_grad=True)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


class _Layer(nn.Module):
    def __init__(self, elements: int, wait_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((elements,), 0.5))
        self._wait_s = wait_s

    def forward(self, hidden: Tensor) -> Tensor:
        return _Wait.apply(hidden, self._wait_s) * self.weight.mean()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        time.sleep(wait_s * FORWARD)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.wait_s * (1 - FORWARD))
        return grads[0], None


def add_waits(layers: Sequence[nn.Module], wait_s: float) -> None:
    """Have forward and backward of ``layers``, which return a tensor, wait ``wait_s`` seconds together."""
    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: _Wait.apply(output, wait_s / len(layers)))


def hugging_face_llama(config: Config) -> nn.Module:
    """Return the Llama of transformers, of the shape of the built-in model and with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

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
    return LlamaForCausalLM(made)


class Data(Protocol):
    """Batches by their place."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> object:
        """Return one of them."""


class _Ones:
    """Data for a model that waits."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Tensor:
        return torch.ones(1)


class RandomTokens:
    """Random tokens, the same for the same place."""

    def __init__(self, words: int = WORDS, rows: int = MICRO_BATCH, seq_len: int = SEQ_LEN) -> None:
        self._words = words
        self._shape = rows, seq_len + 1

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Return tokens and those that follow them, [rows, seq_len] each."""
        place = torch.Generator().manual_seed((shard * 1_000_003 + index) * 64 + rank)
        tokens = torch.randint(self._words, self._shape, generator=place)
        return tokens[:, :-1], tokens[:, 1:]


def make_model(setup: RecoverySetup) -> nn.Module:
    """Return the model of a setup, not sharded."""
    if not setup.transformer:
        return Waiting(setup.layers, setup.elements, setup.wait_s)
    from ft_hsdp.train.model import ModelArgs, Transformer  # a rank that waits starts without it

    return Transformer(ModelArgs(WORDS, DIM, LAYERS, HEADS, HEADS, FFN_DIM, SEQ_LEN))


def make_data(setup: RecoverySetup) -> Data:
    """Return what the model is trained on."""
    return RandomTokens() if setup.transformer else _Ones()


def main(config: Config, replica: int | IncarnationSource, run: Path) -> int:
    """Run one rank until it is told to leave; return the exit code."""
    setup = RecoverySetup(**json.loads((Path(config.job.runs_dir) / FILE).read_text()))
    try:
        job = ft_hsdp.join(config, replica, run)
        data = make_data(setup)
        model = job.shard(make_model(setup))
        optim = job.optimizer(build_optimizer(config, list(model.parameters())))
        job.warm_up(lambda: model(data.batch(0, 0, job.rank)).backward())
        signal.signal(signal.SIGTERM, lambda *_: job.leave())
        for batch in job.batches(data):
            model(batch).backward()
            optim.step()
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_LEFT
