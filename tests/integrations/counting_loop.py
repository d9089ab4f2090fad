"""The model, the data and the seeds of an example that counts, in a loop of our own: what it has to end with."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import ft_hsdp

PARTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {  # that each trainer shards by themselves
    "accelerate": lambda model: (*model.blocks, [model.norm], model),
    "fabric": lambda model: (*model.blocks, [model.norm, model.head], model),
    "ray_train": lambda model: (*model.blocks, model),
}


def main(example: str) -> None:
    """Train until the job ends."""
    plain = runpy.run_path(str(Path(__file__).parents[2] / "examples" / example / "plain.py"))
    job = ft_hsdp.join()
    torch.manual_seed(0)
    model = plain["Model"]()
    mesh = init_device_mesh("cpu", (job.ranks,))
    for part in PARTS[example](model):
        fully_shard(part, mesh=mesh)
    job.adopt(model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optim = job.optimizer(adam, LambdaLR(adam, lambda step: min(1.0, (step + 1) / 20)))
    optim.clip = 1.0
    for numbers in job.loader(plain["Counts"](), batch_size=8, shuffle=True, drop_last=False):
        if example == "ray_train":  # its model returns the loss
            loss = model(numbers)
        else:
            loss = functional.cross_entropy(model(numbers[:, :-1]), numbers[:, 1:].flatten())
        loss.backward()
        optim.step(loss=loss)


if __name__ == "__main__":
    main(sys.argv[1])
