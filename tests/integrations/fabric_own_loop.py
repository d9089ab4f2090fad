"""The model, the data and the seeds of examples/fabric, in a loop of our own: what Fabric has to end with."""

import runpy
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import ft_hsdp

PLAIN = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "fabric" / "plain.py"))


def main() -> None:
    """Train until the job ends."""
    job = ft_hsdp.join()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (job.ranks,), mesh_dim_names=("data_parallel",))
    model = job.adopt(PLAIN["shard"](PLAIN["Model"](), mesh))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optim = job.optimizer(adam, LambdaLR(adam, lambda step: min(1.0, (step + 1) / 20)))
    optim.clip = 1.0
    for numbers in job.loader(PLAIN["Counts"](), batch_size=8, shuffle=True, drop_last=False):
        logits = model(numbers[:, :-1])
        loss = functional.cross_entropy(logits, numbers[:, 1:].flatten())
        loss.backward()
        optim.step(loss=loss)


if __name__ == "__main__":
    main()
