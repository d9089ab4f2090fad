"""A model with what training changes beside the trainable parameters; its arguments say what is declared how."""

import json
import sys

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import spectral_norm

import ft_hsdp

WIDTH, CODES = 8, 5


class Codebook(nn.Module):
    """Adds the nearest code, and moves the codes by an average, past what counts a tensor's versions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(CODES, WIDTH))
        self.codes: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] in and out."""
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            for code in nearest.unique():
                self.codes.data[code].lerp_(x.detach()[nearest == code].mean(0), 0.1)
        return x + self.codes[nearest]


class Observer(nn.Module):
    """The least and the largest value that it has seen, and how often it has looked; another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("high", torch.tensor(-torch.inf, dtype=torch.float64))
        self.register_buffer("looks", torch.tensor(0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] in and out."""
        self.low = torch.minimum(self.low, x.detach().min())
        self.high = torch.maximum(self.high, x.detach().max().double())
        self.looks = self.looks + 1
        return x


class Model(nn.Module):
    """Two layers, and a teacher that follows the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.codebook, self.observer = Codebook(), Observer()
        self.head, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("bias", torch.zeros(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """The loss, a scalar."""
        x = self.observer(self.codebook(self.body(x)))
        return (self.head(x) + self.bias - self.teacher(x)).square().mean()


class Data:
    """Noise; each batch is a function of its place."""

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Tensor:
        """[6, width]."""
        place = hash((shard, index, rank, micro)) % 2**63
        return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(place))


def main() -> None:
    """Train until the job ends: the modes as JSON, and when the bias moves."""
    buffers, when = json.loads(sys.argv[1]), sys.argv[2]
    job = ft_hsdp.join()
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (job.ranks,))
    fully_shard(model, mesh=mesh)
    job.adopt(model, buffers=buffers)
    optim = job.optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))

    @job.on_commit
    def follow(step: object) -> None:
        with torch.no_grad():
            for mine, theirs in zip(model.teacher.parameters(), model.head.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    for batch in job.batches(Data()):
        model(batch).backward()
        if when == "before":
            model.bias += batch.mean().bfloat16() + 0.01
        optim.step()
        if when == f"after {job.step}":
            model.bias += 1


if __name__ == "__main__":
    main()
