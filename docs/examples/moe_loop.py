"""The built-in trainer's data and optimizer with a small mixture of experts, for study-moe.yaml."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ft_hsdp
from ft_hsdp.core.randomness import stream
from ft_hsdp.train.model import FeedForward, ModelArgs, Transformer
from ft_hsdp.train.trainer import build, build_optimizer, dataset, eval_dataset, factor

EXPERTS = 4


class Experts(nn.Module):
    """Each token goes to one of four feed-forwards: the output of the likeliest, times its probability."""

    def __init__(self, args: ModelArgs, seed: int) -> None:
        super().__init__()
        self.router = nn.Linear(args.dim, EXPERTS, bias=False)
        self.experts = nn.ModuleList(FeedForward(args) for _ in range(EXPERTS))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * args.dim**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> the same shape."""
        tokens = x.flatten(0, 1)
        chance, choice = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()  # maybe none: its gradient is zero then
            out = out.index_add(0, rows, expert(tokens[rows]) * chance[rows, None])
        return out.view_as(x)


def mixture(model: Transformer, seed: int) -> Transformer:
    """``model`` with experts in place of the feed-forward of each block."""
    for number, block in enumerate(model.layers):
        block.ffn = Experts(model.args, stream(seed, "experts", number))
    return model


def main() -> None:
    """Train until the job ends."""
    job = ft_hsdp.join()
    config = job.config
    model = job.shard(mixture(build(config), config.train.seed))
    optim = job.optimizer(build_optimizer(config, list(model.parameters())), lambda step: factor(config, step))
    optim.clip = config.optim.clip
    if config.eval.every:
        job.evaluate(model, eval_dataset(config))
    for batch in job.batches(dataset(config), config.train.accumulate):
        model(batch).backward()
        optim.step()


if __name__ == "__main__":
    main()
