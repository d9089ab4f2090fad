"""The trainer that comes with ft_hsdp, and an example of its public API: `train` is a user's loop."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from ft_hsdp.config import Config
from ft_hsdp.train.data.batches import IGNORED, Batches
from ft_hsdp.train.data.prefetch import move
from ft_hsdp.train.fsdp.adopted_model import FP32
from ft_hsdp.train.join import join
from ft_hsdp.train.model import ModelArgs, Transformer
from ft_hsdp.train.tokens import Tokens, naming, prepare


def dataset(config: Config) -> Batches:
    t = config.train
    return Batches(
        _tokens(config, config.data.path),
        t.seq_len,
        t.micro_batch,
        t.seed,
        config.data_shards,
        ranks=config.ranks_per_replica,
        accumulate=t.accumulate,
        ignore_first=config.data.weight == "tokens",
    )


def eval_dataset(config: Config) -> Batches:
    """Return the batches of evaluations; a text that is too small for one evaluation is read again."""
    t, ignore_first = config.train, config.data.weight == "tokens"
    with naming("eval.data"):
        tokens = _tokens(config, config.eval.data or "")
        return Batches(tokens, t.seq_len, t.micro_batch, t.seed, 1, ignore_first=ignore_first)


def _tokens(config: Config, path: str) -> Tokens:
    cache = Path(config.job.runs_dir) / ".cache"
    return Tokens.open(prepare(path, config.data.tokenizer, config.data.max_bytes, cache))


def weight(config: Config, batch: tuple[Tensor, Tensor]) -> int:
    """Return the weight of one rank's micro-batch: 1, or the number of its targets that count."""
    return int((batch[1] != IGNORED).sum()) if config.data.weight == "tokens" else 1


def build(config: Config) -> Transformer:
    t = config.train
    args = ModelArgs.of(config.model, config.data.vocabulary, t.seq_len, t.recompute)
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


def train(config: Config) -> None:
    """Train until the job ends, or until SIGTERM: then the replica leaves at the next commit (`Job.batches`)."""
    data = dataset(config)
    evaluated = eval_dataset(config) if config.eval.every else None
    job = join()
    job.built_in = True
    with torch.device("meta"):
        model = build(config)
    job.shard(model, policy=policy(config), init=lambda: model.reset(config.train.seed))
    optimizer = build_optimizer(config, list(model.parameters()))
    optim = job.optimizer(optimizer, lambda step: factor(config, step))
    optim.clip = config.optim.clip

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        if config.data.weight == "tokens":
            job.weigh(weight(config, batch))
        loss: Tensor = model(batch)
        return loss

    if evaluated is not None:
        job.evaluate(loss_of, evaluated)
    job.warm_up(lambda: model(move(data.batch(0, 0, job.rank), job.device)).backward())
    for batch in job.batches(data, config.train.accumulate):
        loss_of(batch).backward()
        optim.step()
