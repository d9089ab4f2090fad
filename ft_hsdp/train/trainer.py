"""The trainer that comes with ft_hsdp, and an example of its public API: `train` is a user's loop."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ft_hsdp.config import Config
from ft_hsdp.core.ledger import BatchAssigner
from ft_hsdp.errors import EXIT_LEFT, EXIT_OK, FtHsdpError
from ft_hsdp.train.data import Batches, move
from ft_hsdp.train.fsdp import FP32
from ft_hsdp.train.identity import IncarnationSource
from ft_hsdp.train.join import join
from ft_hsdp.train.model import ModelArgs, Transformer
from ft_hsdp.train.tokens import VOCABULARY, Tokens, prepare


def dataset(config: Config) -> Batches:
    """Return the batches of the job, over the tokens that the launcher prepared."""
    cache = Path(config.job.runs_dir) / ".cache"
    tokens = Tokens.open(prepare(config.data.path, config.data.tokenizer, config.data.max_bytes, cache))
    t = config.train
    return Batches(
        tokens,
        t.seq_len,
        t.micro_batch,
        t.seed,
        BatchAssigner(config.data.assignment, config.slots).shards,
        ranks=config.ranks_per_replica,
        accumulate=t.accumulate,
    )


def build(config: Config) -> Transformer:
    """Return the model with its initial weights, a function of the configuration alone."""
    t = config.train
    args = ModelArgs.of(config.model, VOCABULARY[config.data.tokenizer], t.seq_len, t.recompute)
    return Transformer(args, t.seed)


def policy(config: Config) -> MixedPrecisionPolicy:
    """Return the types of forward and backward: bf16 if the configuration says so, but not for positions."""
    if config.train.precision == "float32":
        return FP32
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


def build_optimizer(config: Config, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, never fused: the results of its fused form depend on the sharding."""
    o = config.optim
    return torch.optim.AdamW(params, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)


def factor(config: Config, step: int) -> float:
    """Return the factor on the learning rate of ``step`` (from 1): a linear warm-up, then the schedule's shape."""
    c = config.lr
    if step <= c.warmup:
        return step / c.warmup
    done = min(1.0, (step - c.warmup) / max(1, config.train.steps - c.warmup))
    match c.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - c.min_ratio) * done
        case "cosine":
            return c.min_ratio + (1.0 - c.min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


def train(config: Config, replica: int | IncarnationSource, run: Path) -> int:
    """Train until the job ends, or until SIGTERM: then the replica leaves at the next commit.

    Returns:
        The exit code.
    """
    data = dataset(config)
    job = join(config, replica, run)
    job.built_in = True
    model = job.shard(build(config), policy=policy(config))
    optimizer = build_optimizer(config, list(model.parameters()))
    optim = job.optimizer(optimizer, lambda step: factor(config, step))
    optim.clip = config.optim.clip
    job.warm_up(lambda: model(move(data.batch(0, 0, job.rank), job.device)).backward())
    told: list[int] = []

    def leave(number: int, _: object) -> None:
        told.append(number)
        job.leave()

    signal.signal(signal.SIGTERM, leave)  # until now SIGTERM ends this process at once: it is no member
    for batch in job.batches(data, config.train.accumulate):
        model(batch).backward()
        optim.step()
    return EXIT_LEFT if told and not job.over else EXIT_OK


def main(config: Config, replica: int | IncarnationSource, run: Path) -> int:
    """Run one rank, of a replica that is known or will be assigned; return the exit code."""
    try:
        return train(config, replica, run)
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
