"""The model, the data and the seeds of examples/ray_train, in a loop of our own: what it has to end with."""

import runpy
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import ft_hsdp

PLAIN = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "ray_train" / "plain.py"))


def main() -> None:
    """Train until the job ends."""
    job = ft_hsdp.join()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (job.ranks,))
    model = PLAIN["Model"]()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    model = job.adopt(fully_shard(model, mesh=mesh))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optim = job.optimizer(adam, LambdaLR(adam, lambda step: min(1.0, (step + 1) / 20)))
    optim.clip = 1.0
    for numbers in job.loader(PLAIN["Counts"](), batch_size=8, shuffle=True, drop_last=False):
        model(numbers).backward()
        optim.step()


if __name__ == "__main__":
    main()
