"""A user's loop whose data are not the same in all replicas, or in all lives of one.

`other_data_loop.py ROWS`: a dataset of one sample less on replica 1. `LATER`: so it is in its second life only.
`LIVE`: a stream whose `state_dict` returns the mapping that it goes on to change.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ft_hsdp
from tests.support.slow_script import pause

ROWS = 160
READ_S = 0.03  # of a batch, so that a state was saved by the step of the loss


class Live:
    def __init__(self, shard: int, shards: int) -> None:
        self.shard, self.shards, self.state = shard, shards, {"next": 0}

    def __iter__(self) -> Iterator[Any]:
        while True:
            pause(READ_S)
            self.state["next"] += 1
            yield torch.full((1, 4), float((self.state["next"] - 1) * self.shards + self.shard))

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def main(what: str) -> None:
    job = ft_hsdp.join()
    torch.manual_seed(0)
    model = job.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), parts=[])
    optim = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    fed = Path(f"fed-{job.replica}.jsonl")
    if what == "LIVE":
        source: Any = job.stream(Live)
    else:
        odd = job.replica == 1 and (what == "ROWS" or fed.exists())
        source = job.loader(TensorDataset(torch.arange(4.0 * (ROWS - odd)).view(-1, 4)), 2)
    for batch in source:
        x = batch if what == "LIVE" else batch[0]
        with fed.open("a") as file:
            file.write(json.dumps({"step": job.step + 1, "first": x[0, 0].item()}) + "\n")
        if what == "LATER":
            pause(READ_S)
        loss = model(x / 1e6).square().mean()
        loss.backward()
        optim.step(loss)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ft_hsdp.FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
