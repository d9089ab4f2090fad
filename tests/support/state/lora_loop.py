"""A fine-tune of small adapters on a frozen base, sharded by its own calls of `fully_shard`."""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ft_hsdp

WIDTH, RANK, LAYERS = 256, 8, 3


class Adapted(nn.Module):
    """A frozen matrix in bf16 and two small trainable ones in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] in and out."""
        return x + self.base(x.bfloat16()).float() + self.up(self.down(x))


class Model(nn.Module):
    """Layers, of which the adapters alone are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """The loss, a scalar."""
        for layer in self.layers:
            x = layer(x)
        return (x - 1).square().mean()


class Data:
    """Noise; each batch is a function of its place."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Tensor:
        """[4, width]."""
        place = hash((shard, index, rank, micro)) % 2**63
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(place))


def main() -> None:
    """Train until the job ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", type=int, help="a replica whose base is another one")
    args = parser.parse_args()
    job = ft_hsdp.join()
    torch.manual_seed(job.replica == args.other)
    bases = [Adapted().base.weight.detach().clone() for _ in range(LAYERS)]
    torch.manual_seed(0)
    model = Model()
    for layer, base in zip(model.layers, bases, strict=True):
        layer.get_parameter("base.weight").data.copy_(base)
    mesh = init_device_mesh("cpu", (job.ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    job.adopt(model)
    optim = job.optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))
    for batch in job.batches(Data()):
        model(batch).backward()
        optim.step()


if __name__ == "__main__":
    main()
