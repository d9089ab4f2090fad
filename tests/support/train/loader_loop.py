"""A user's loop over `job.loader` or `job.stream`, which writes down what it was fed.

`loader_loop.py stream`: the source of replica 0 has a state that is saved, that of replica 1 has none.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import ft_hsdp
from tests.support.slow_script import pause

SAMPLES, BATCH = 1000, 4
READ_S = 0.05  # of a sample, so that a replica that is killed comes back before the end
STREAM_READ_S = 0.05  # so that a state was saved by the step of the loss: one is, each second
WIDTH = 8


class Slow(Dataset[Any]):
    """Samples that take their time, with noise from two generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        pause(READ_S)
        return {"sample": index, "noise": random.random(), "input_ids": torch.randn(WIDTH)}


class Plain:
    """Endless batches of one sample of a shard; each says how many this process has read."""

    def __init__(self, shard: int, shards: int) -> None:
        self.shard, self.shards, self.next, self.read = shard, shards, 0, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            pause(STREAM_READ_S)
            self.next += 1
            self.read += 1
            sample = (self.next - 1) * self.shards + self.shard
            drawn = torch.Generator().manual_seed(sample)
            yield {
                "sample": torch.tensor([sample]),
                "noise": torch.tensor([float(self.read)]),
                "input_ids": torch.randn(1, WIDTH, generator=drawn),
            }


class Stateful(Plain):
    """The same with the interface of torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.end = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.end(x).square().mean()


def main() -> int:
    job = ft_hsdp.join()
    torch.manual_seed(0)
    model = job.shard(Small())
    optim = job.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    if sys.argv[1:] == ["stream"]:
        source: Any = job.stream((Stateful, Plain)[job.replica])
    else:
        source = job.loader(Slow(), BATCH, num_workers=2)
    job.warm_up(lambda: model(torch.ones(1, WIDTH)).backward())
    for batch in source:
        row = {"step": job.step + 1, "samples": batch["sample"].tolist(), "noise": batch["noise"].tolist()}
        with Path(f"fed-{job.replica}-{job.rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        model(batch["input_ids"]).backward()
        optim.step()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ft_hsdp.FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
