"""What cannot work: one call each, made by a rank of a job that has not checked in, and how it is refused."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from ft_hsdp.train.job import Job
from tests.compatibility.cases import each_block
from tests.compatibility.models import Convolutional, Decoder


def adopted(job: Job, model: Any = None) -> Any:
    model = Decoder() if model is None else model
    each_block(model, init_device_mesh("cpu", (1,)))
    return job.adopt(model)


def not_sharded(job: Job) -> None:
    job.adopt(Decoder())


def ddp(job: Job) -> None:
    job.adopt(DistributedDataParallel(Decoder()))


def fsdp1(job: Job) -> None:
    job.adopt(FullyShardedDataParallel(Decoder(), device_id=torch.device("cpu")))


def hybrid_mesh(job: Job) -> None:
    model, mesh = Decoder(), init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    job.adopt(model)


def cpu_offload(job: Job) -> None:
    model = Decoder()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    job.adopt(model)


def meta_device(job: Job) -> None:
    with torch.device("meta"):
        model = Decoder()
    adopted(job, model)


def fp16(job: Job) -> None:
    adopted(job, Decoder().half())


def batch_norm(job: Job) -> None:
    adopted(job, Convolutional(nn.BatchNorm1d))


def shard_over_data_ranks(job: Job) -> None:
    job.config = job.config.model_copy(update={"ranks_per_unit": 2})
    job.shard(Decoder())


def second_model(job: Job) -> None:
    adopted(job)
    adopted(job)


def lbfgs(job: Job) -> None:
    job.optimizer(LBFGS(adopted(job).parameters()))


def dampening(job: Job) -> None:
    job.optimizer(SGD(adopted(job).parameters(), lr=0.1, momentum=0.9, dampening=0.5))


def part_of_the_parameters(job: Job) -> None:
    job.optimizer(AdamW(adopted(job).head.parameters()))


def before_adopt(job: Job) -> None:
    model = Decoder()
    optimizer = AdamW(model.parameters())
    adopted(job, model)
    job.optimizer(optimizer)


def second_call(job: Job) -> None:
    model = adopted(job)
    job.optimizer(AdamW(model.parameters()))
    job.optimizer(AdamW(model.parameters()))


def scheduler_beside_it(job: Job) -> None:
    optimizer = AdamW(adopted(job).parameters())
    LambdaLR(optimizer, lambda step: 1.0)
    job.optimizer(optimizer)


def data_loader(job: Job) -> None:
    job.optimizer(AdamW(adopted(job).parameters()))
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)))
    next(job.batches(loader))


REFUSED: dict[str, Callable[[Job], None]] = {
    "a model that is not sharded": not_sharded,
    "DistributedDataParallel": ddp,
    "FullyShardedDataParallel (FSDP1)": fsdp1,
    "a mesh that replicates inside the replica (HSDP)": hybrid_mesh,
    "CPUOffloadPolicy": cpu_offload,
    "weights on the meta device": meta_device,
    "parameters in fp16": fp16,
    "BatchNorm with running statistics": batch_norm,
    "`job.shard` with tensor parallelism": shard_over_data_ranks,
    "a second model": second_model,
    "LBFGS": lbfgs,
    "SGD with dampening": dampening,
    "an optimizer of some of the parameters": part_of_the_parameters,
    "an optimizer that was made before the model was sharded": before_adopt,
    "a second call of job.optimizer": second_call,
    "a scheduler that job.optimizer was not given": scheduler_beside_it,
    "torch's DataLoader as it is": data_loader,
}
